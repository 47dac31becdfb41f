"""The attention function: what "sdpa" gives outside a planned step, and what it refuses in one."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.masking_utils import create_causal_mask
from transformers.utils.logging import warning_once

import hf_distca
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.patches.attention import (
    UNPLANNED,
    DeferredMask,
    distca_attention,
    distca_mask,
    scaled_by_position,
)
from hf_distca.planner.settings import PlanSettings
from tests.logged import Messages
from tests.mixing.steps import make_model
from tests.models_and_batches import small_kinds, small_model


def pair(model_type="llama", other="sdpa"):
    return tuple(make_model(model_type, name).eval() for name in ("distca", other))


MODELS = {
    **dict.fromkeys(("llama", "mistral", "doge", "gemma4_text"), "sdpa"),
    **dict.fromkeys(("gemma2", "gpt_oss"), "eager"),
}
"""Models, and the stock attention to compare with."""


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("model_type", MODELS)
def test_batches(model_type, padding):
    model, reference = pair(model_type, MODELS[model_type])
    tokens = torch.arange(3, 27).view(2, 12)
    mask = torch.ones_like(tokens)
    if padding == "left":
        mask[0, :5] = 0
    elif padding == "right":
        mask[1, 8:] = 0
    inputs = {"input_ids": tokens, "attention_mask": mask if padding else None}
    with torch.no_grad():
        got = model(**inputs).logits
        expected = reference(**inputs).logits
    is_token = mask.bool()
    torch.testing.assert_close(got[is_token], expected[is_token], rtol=1e-5, atol=1e-5)


ROW = torch.arange(3, 9)[None]
ROWS = torch.arange(3, 15).view(2, 6)
MASK = torch.tensor([[0, 0, 0, 1, 1, 1], [1] * 6])


@pytest.mark.parametrize(
    ("model_type", "tokens", "options"),
    [
        ("llama", ROW, {}),
        ("doge", ROW, {}),
        ("gemma4_text", ROW, {}),
        ("llama", ROW, {"cache_implementation": "static"}),
        ("doge", ROW, {"cache_implementation": "static"}),
        ("gemma4_text", ROW, {"cache_implementation": "static"}),
        ("llama", ROWS, {"attention_mask": MASK}),
        ("llama", ROW, {"prefill_chunk_size": 4}),
    ],
)
def test_generate(model_type, tokens, options):
    model, reference = pair(model_type)
    options = {"max_new_tokens": 5, "do_sample": False, "use_cache": True, **options}
    assert torch.equal(model.generate(tokens, **options), reference.generate(tokens, **options))


def test_packed_row_without_plan():
    model, reference = pair()
    inputs = {
        "input_ids": torch.arange(3, 13)[None],
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1, 0]]),
    }
    torch.testing.assert_close(model(**inputs).logits, reference(**inputs).logits)
    whole = model(input_ids=inputs["input_ids"]).logits
    assert not torch.allclose(
        whole, model(**inputs).logits
    )  # the documents did not see one another


@pytest.mark.parametrize("logits_to_keep", [0, 1, 5])
def test_logits_of_the_last_rows(logits_to_keep):
    tokens = torch.arange(3, 15)[None]
    model, reference = pair("gemma4_text")
    with torch.no_grad():
        got = model(tokens, logits_to_keep=logits_to_keep).logits
        expected = reference(tokens, logits_to_keep=logits_to_keep).logits
    torch.testing.assert_close(got, expected)


def test_masks():
    """They are made only where needed, and know what the model put in."""
    padding = torch.tensor([[False, True, True]])
    padded = [[False, False, False], [False, True, False], [False, True, True]]
    assert distca_mask(1, 3, 3, attention_mask=padding).tolist() == [[padded]]
    assert distca_mask(1, 5, 5, local_size=3).local_size == 3
    assert distca_mask(1, 5, 5).local_size is None
    # A model that lets tokens of one image see each other, say, through transformers' masks.
    inputs = {
        "inputs_embeds": torch.zeros(1, 12, 32),
        "attention_mask": None,
        "past_key_values": None,
    }
    config = small_model().config
    mask = create_causal_mask(config, **inputs, or_mask_function=lambda batch, head, q, k: k < 3)
    assert mask.added_by_model
    assert not create_causal_mask(config, **inputs).added_by_model


@pytest.mark.parametrize(
    ("sizes", "offset"),
    [((2, 5, 5), 0), ((1, 5, 9), 4), ((1, 5, 5), 4)],
    ids=["two sequences", "cached keys", "no cached keys"],
)
def test_masks_that_are_made(sizes, offset):
    assert not isinstance(distca_mask(*sizes, q_offset=offset), DeferredMask)


class LlamaAttention(nn.Module):
    """Has what the attention function looks at."""

    layer_idx = 3


def deferred(local_size=None, added_by_model=False) -> DeferredMask:
    return DeferredMask(local_size, added_by_model, make=lambda: None)


REFUSED = [
    ({"dropout": 0.1}, r"LlamaAttention \(layer 3\) uses attention dropout 0.1"),
    ({"batch": 2}, r"got a batch of 2 rows, but a planned step needs batch size 1"),
    ({"mask": torch.ones(1, 1, 12, 12)}, r"got an attention_mask of shape \[1, 1, 12, 12\]"),
    ({"mask": deferred(added_by_model=True)}, "adds a custom mask to the causal mask"),
    ({"mask": deferred(local_size=4)}, "masks by a local size of 4, but has sliding_window=None"),
    (
        {"mask": deferred(local_size=4), "sliding_window": 5},
        "local size of 4, but has sliding_window=5",
    ),
    ({"is_causal": False}, "is not causal"),
    ({"module_is_causal": False}, "is not causal"),
    ({"position_bias": torch.zeros(1)}, "passes position_bias"),
    ({"cache": object()}, "passes cache"),
]


def test_what_a_plan_cannot_express(subtests):
    dispatcher = Dispatcher(
        PlanSettings(ranks=1, rows_per_rank=64, kinds=small_kinds()), torch.device("cpu")
    )
    plan = dispatcher.bind(dispatcher.plan_lengths([[5, 7]])[0])

    def attend(mask=None, batch=1, module_is_causal=True, **kwargs):
        query = torch.randn(batch, 4, 12, 8)
        key = torch.randn(batch, 2, 12, 8)
        module = LlamaAttention()
        module.is_causal = module_is_causal
        return distca_attention(module, query, key, key, mask, distca_plan=plan, **kwargs)

    for arguments, message in REFUSED:
        with subtests.test(message), pytest.raises(ValueError, match=message):
            attend(**arguments)
    assert plan.ran.attentions == 0
    output, weights = attend(deferred())
    assert output.shape == (1, 12, 4, 8)
    assert weights is None
    assert plan.ran.attentions == 1
    attend(
        module_is_causal=False, is_causal=True
    )  # what the call says goes before what the module says


@pytest.mark.parametrize("lengths", [[50, 20], [20, 50], [30, 25, 20]])
def test_queries_are_scaled_by_positions_in_documents(lengths):
    """Llama 4's factors grow with each 40 positions; the model takes rows of the call for
    positions.
    """
    settings = PlanSettings(ranks=1, rows_per_rank=128, kinds=small_kinds(), ping_pong=True)
    dispatcher = Dispatcher(settings, torch.device("cpu"))
    plan = dispatcher.bind(dispatcher.plan_lengths([lengths])[0])
    assert len(plan.nano_batches) == 2
    module = SimpleNamespace(use_rope=False, floor_scale=40, attn_scale=0.5)
    of_model = torch.log1p((torch.arange(1, sum(lengths) + 1) // 40).float()) * 0.5 + 1.0
    scaled = scaled_by_position(module, of_model[:, None], plan)[:, 0]
    assert plan.last_position == max(lengths) - 1
    assert plan.positions.max() == max(lengths) - 1
    torch.testing.assert_close(
        scaled, torch.log1p(((plan.positions + 1) // 40).float()) * 0.5 + 1.0
    )
    for part, nano in (
        (plan.of_nano_batch(i, lambda: None), nano) for i, nano in enumerate(plan.nano_batches)
    ):
        of_part = of_model[: nano.rows]
        scaled = scaled_by_position(module, of_part[:, None], part)[:, 0]
        torch.testing.assert_close(
            scaled, torch.log1p(((nano.positions + 1) // 40).float()) * 0.5 + 1.0
        )


def _warnings_of_unplanned_steps(folder: Path) -> list[list[str]]:
    """What a rank warns of: first where nothing is trained without a plan by mistake, then in a
    stock training.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    warning_once.cache_clear()  # of other tests in this process
    tokens = torch.arange(3, 9)[None]
    model = small_model()
    prepared = small_model()
    config = hf_distca.DistCAConfig(tokens_per_rank=64)
    dispatcher = hf_distca.make_dispatcher(prepared, config, torch.device("cpu"))
    messages = Messages("hf_distca.patches.attention")
    model.eval()(tokens)
    model.generate(tokens, max_new_tokens=2)
    with torch.no_grad():
        model.train()(tokens)
    prepared.train()(tokens, labels=tokens).loss.backward()
    dispatcher.close()
    quiet = list(messages.lines)
    options = {
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "max_steps": 2,
        "save_strategy": "no",
    }
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=1, disable_tqdm=True, **options
    )
    rows = [{"input_ids": [3, 4, 5], "labels": [3, 4, 5]}] * 4
    Trainer(model, args, train_dataset=rows).train()
    messages.end()
    return [quiet, messages.lines[len(quiet) :]]


def test_a_stock_training_on_several_ranks_warns_once(rank_pools, tmp_path):
    first, second = rank_pools[2].run(_warnings_of_unplanned_steps, tmp_path)
    assert first == [[], [f"WARNING {UNPLANNED.format(ranks=2)}"]]
    assert second == [[], []]
    # One rank has nothing to balance.
    (alone,) = rank_pools[1].run(_warnings_of_unplanned_steps, tmp_path)
    assert alone == [[], []]
