"""Rotary embeddings that depend on the length of a document: as each document alone has them, on
any rank.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig

from hf_distca import Dispatcher, DistCAConfig, describe_run, make_dispatcher
from hf_distca.checks.model_rules import Models
from hf_distca.memory.counted_step import count_peaks
from hf_distca.memory.counter import MemoryCounter
from hf_distca.models.checkpointing import enable_checkpointing
from hf_distca.models.fake import model_after, model_of_config
from hf_distca.models.rotary_types import config_depends_on_length
from hf_distca.patches.prepare import prepare_model
from hf_distca.patches.rotary import plan_rotary
from hf_distca.planner.micro_batch import plan_micro_batch
from tests.models_and_batches import (
    SMALL,
    assert_same_step,
    cut_rows,
    planned_step,
    random_documents,
    reference_step,
    relative_error,
    small_model,
    small_run,
)
from tests.refused import refused

BEYOND = 48
"""Tokens from which on a document has other frequencies."""
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "original_max_position_embeddings": BEYOND,
    **FACTORS,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 100.0}
MOE = {"num_local_experts": 2, "num_experts_per_tok": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": ("llama", {"rope_parameters": LONGROPE, "max_position_embeddings": 4 * BEYOND}),
    "dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": BEYOND}),
    "layer types": (
        "gemma3_text",
        {
            "rope_parameters": {"sliding_attention": PLAIN, "full_attention": DYNAMIC},
            "layer_types": ["sliding_attention", "full_attention"],
            "max_position_embeddings": BEYOND,
            "sliding_window": 16,
        },
    ),
    "a factor on cos and sin": (
        "phimoe",
        {"rope_parameters": {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.5}, **MOE},
    ),
}
LENGTHS = [90, BEYOND + 1, BEYOND, 7, 60, 1]
WIDE = {"initializer_range": 0.2}
"""Attention that depends on positions: with transformers' small weights it would hardly do."""


def model_of(kind: str, implementation: str = "distca") -> Any:
    model_type, config = MODELS[kind]
    return small_model(model_type, implementation, **{**config, **WIDE})


def embeddings(model: Any, rotary: nn.Module, run: Any) -> list[tuple[Tensor, Tensor]]:
    """Cos and sin of a rotary embedding while a model runs, by type of layer: models call it in any
    order.
    """
    calls: dict[str, tuple[Tensor, Tensor]] = {}

    def note(_module: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        calls[args[-1] if isinstance(args[-1], str) else ""] = output

    handle = rotary.register_forward_hook(note)
    with torch.no_grad():
        run(model)
    handle.remove()
    return [calls[layer_type] for layer_type in sorted(calls)]


FINE = {"balance_block_size": 8, "balance_tolerance": 0.01}


def _rows_of_rank(
    kind: str, dtype: torch.dtype | None
) -> tuple[list[tuple[int, int, int]], list[Any]]:
    """The rows that this rank holds, and their cos and sin, after another micro-batch and a row
    without a plan.
    """
    model = model_of(kind)
    config = DistCAConfig(tokens_per_rank=256, document_layout="fixed", planning=FINE)
    dispatcher = make_dispatcher(model, config, torch.device("cpu"))
    rotary = model.model.rotary_emb
    before = {name: buffer.clone() for name, buffer in rotary.named_buffers()}

    def step(lengths: list[int]) -> Any:
        plan = plan_micro_batch(lengths, dispatcher.settings)
        documents = random_documents(lengths)
        batch = {**cut_rows(plan, dist.get_rank(), documents), "distca_plan": dispatcher.bind(plan)}
        del batch["shift_labels"]
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            rotations = embeddings(model, rotary, lambda model: model(**batch))
        return list(plan.held_by(dist.get_rank())), rotations

    step([120, 3])
    for name, buffer in rotary.named_buffers():
        assert torch.equal(buffer, before[name]), name
    model(input_ids=random_documents([150])[0][None])  # as in a generation
    return step(LENGTHS)


@pytest.mark.parametrize("kind", MODELS)
def test_each_row_is_rotated_as_in_its_document_alone(rank_pools, kind):
    cut = False
    for segments, calls in rank_pools[2].run(_rows_of_rank, kind, None):
        at = 0
        for document, start, stop in segments:
            model = model_of(kind, "eager")
            tokens = random_documents(LENGTHS)[document][None]
            alone = embeddings(
                model, model.model.rotary_emb, lambda model, tokens=tokens: model(input_ids=tokens)
            )
            assert len(alone) == len(calls) == (2 if kind == "layer types" else 1)
            for got, expected in zip(calls, alone, strict=True):
                for planned, stock in zip(got, expected, strict=True):
                    assert torch.equal(planned[:, at : at + stop - start], stock[:, start:stop]), (
                        document,
                        start,
                    )
            at = at + stop - start
            cut = cut or stop - start < LENGTHS[document]
    assert cut


def _step(kind: str, ping_pong: bool, checkpointing: bool | None, dtype: torch.dtype | None) -> Any:
    model = model_of(kind).train()
    config = DistCAConfig(
        tokens_per_rank=300,
        document_layout="fixed",
        planning={**FINE, "ping_pong": ping_pong},
    )
    dispatcher = make_dispatcher(model, config, torch.device("cpu"))
    if checkpointing is not None:
        enable_checkpointing(model, {"use_reentrant": checkpointing})
    bound = dispatcher.bind(plan_micro_batch(LENGTHS, dispatcher.settings))
    assert bound.cuts_paths or dist.get_world_size() == 1
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
        return planned_step(model, bound, random_documents(LENGTHS))


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
@pytest.mark.parametrize(
    ("ranks", "ping_pong", "checkpointing"),
    [(1, False, None), (2, False, None), (2, True, False), (2, True, True)],
)
def test_steps_equal_one_process(rank_pools, kind, ranks, ping_pong, checkpointing):
    expected = reference_step(model_of(kind, "sdpa"), random_documents(LENGTHS))
    for got in rank_pools[ranks].run(_step, kind, ping_pong, checkpointing, None):
        assert_same_step(got, expected)


def test_autocast(rank_pools):
    expected = reference_step(model_of("longrope", "sdpa"), random_documents(LENGTHS))
    with torch.autocast("cpu", torch.bfloat16):
        rough = reference_step(model_of("longrope", "sdpa"), random_documents(LENGTHS))
    for loss, gradients in rank_pools[2].run(_step, "longrope", True, False, torch.bfloat16):
        assert loss == pytest.approx(expected[0], rel=1e-2)
        for name, gradient in expected[1].items():
            bound = 2 * relative_error(rough[1][name], gradient) + 1e-2
            assert relative_error(gradients[name], gradient) < bound, name


def test_configs_that_do_not_depend_on_length():
    assert not config_depends_on_length(AutoConfig.for_model("gpt2"))
    assert not config_depends_on_length(AutoConfig.for_model("llama", rope_parameters=PLAIN))
    assert not config_depends_on_length(
        AutoConfig.for_model("hunyuan_v1_dense", rope_parameters={**DYNAMIC, "alpha": 9.0})
    )


@pytest.mark.parametrize(("model_type", "config"), MODELS.values(), ids=MODELS.keys())
def test_configs_that_depend_on_length(model_type, config):
    assert config_depends_on_length(AutoConfig.for_model(model_type, **{**SMALL, **config}))


def settings_of(model: Any) -> Any:
    config = DistCAConfig(tokens_per_rank=256, planning={"ping_pong": False})
    return describe_run(model, config, ranks=1, device=torch.device("cpu")).plans


def test_a_plan_that_does_not_reach_the_embedding():
    """A model that was not prepared, or whose decoder does not get the plan, or runs on other rows,
    is refused.
    """

    def run(model: Any, dispatcher: Dispatcher) -> None:
        plan = plan_micro_batch([60], dispatcher.settings)
        model(**cut_rows(plan, 0, random_documents([60])), distca_plan=dispatcher.bind(plan))

    message = (
        r"LlamaAttention \(layer 0\) gets a rotary embedding for the longest"
        r" position.*make_dispatcher"
    )
    model = model_of("longrope")
    dispatcher = Dispatcher(settings_of(model), torch.device("cpu"))
    with pytest.raises(ValueError, match=message):
        run(model, dispatcher)
    plan_rotary(model)
    plan_rotary(model)  # once is enough
    run(model, dispatcher)
    forward = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: forward(x, position_ids[:, 1:])
    with pytest.raises(
        ValueError,
        match="LlamaRotaryEmbedding was called with 59 positions, but the plan has 60 rows",
    ):
        run(model, dispatcher)
    stock = model_of("longrope").model.rotary_emb
    model.model.rotary_emb.forward = stock.forward  # as a kernel or a hook may put it there
    with pytest.raises(ValueError, match=message):
        run(model, dispatcher)


class OwnRotary(nn.Module):
    """A rotary embedding as models outside transformers have it."""

    rope_type = "default"

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        return x * position_ids.max()


def test_unknown_embeddings_are_refused():
    for kind, change in (("longrope", {}), ("longrope", {"rope_type": "dynamic"})):
        model = model_of(kind)
        model.model.rotary_emb = OwnRotary()
        vars(model.model.rotary_emb).update(change)
        with refused(Models.LONGEST_POSITION, unknown_rotary="OwnRotary", model="LlamaForCausalLM"):
            settings_of(model)
    model = model_of("longrope")
    model.model.rotary_emb = nn.Identity()
    with refused(Models.LONGEST_POSITION, unknown_rotary="LlamaForCausalLM"):
        settings_of(model)


@pytest.mark.parametrize("kind", MODELS)
def test_memory_is_counted(kind):
    """Fake tensors have no values to choose frequencies by."""
    model_type, config = MODELS[kind]
    of_type = AutoConfig.for_model(model_type, **{**SMALL, **config})
    counts = []
    for made in (model_of_config(of_type, torch.float32), small_model(model_type, **config)):
        settings = replace(settings_of(made), kernel="torch_varlen")
        plan = plan_micro_batch([BEYOND + 9, BEYOND, 3], settings)
        run = small_run(settings, loss_chunk_bytes=0)
        if counts:
            prepare_model(made, run)
            counts.append(count_peaks(model_after(made), plan, 0, run).on_device)
        else:
            counts.append(MemoryCounter(made, by_config=True).count(plan, run).parts)
    for part, count in counts[0].items():
        assert counts[1][part] == count, part
