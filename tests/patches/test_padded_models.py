"""Padded batches of several ranks, packed and planned, against stock attention on each rank's own
padded batch.

Shape suffixes: B sequences, L columns.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    GPT2Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.integrations.neftune import activate_neftune
from transformers.utils.logging import info_once

from hf_distca import DistCAConfig, pack_padded
from hf_distca.checks.model_rules import Models
from hf_distca.checks.refusal import RefusedError
from hf_distca.dispatch import padded_rows
from hf_distca.dispatch.padded_rows import (
    PackedBatch,
    PaddedBatches,
)
from hf_distca.models.checkpointing import enable_checkpointing
from hf_distca.models.decoder import backbone
from hf_distca.models.sharing import shares_prefixes, why_sequences_share_nothing
from hf_distca.patches.padded_models import plan_ahead
from hf_distca.planner import prefixes
from hf_distca.planner.padding import PlannedPadding, plan_padded
from hf_distca.planner.settings import PlanSettings
from tests.models_and_batches import (
    SMALL,
    SMALL_HYBRID,
    SMALL_KIND,
    SMALL_LLAMA4,
    with_lora,
    with_planning,
)
from tests.models_and_batches import small_model as small_model_of
from tests.patches.test_rotary import LONGROPE
from tests.ranks import RankPool
from tests.refused import refused
from tests.survey.tiny import tiny_config

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SMALL),
    "windows": lambda: MistralConfig(**SMALL, sliding_window=7),
    "chunks": lambda: Llama4TextConfig(**{**SMALL, **SMALL_LLAMA4, "attention_chunk_size": 7}),
    "sinks": lambda: GptOssConfig(
        **SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=7
    ),
    "experts": lambda: Qwen3MoeConfig(
        **SMALL,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        output_router_logits=True,
    ),
    "learned positions": lambda: GPT2Config(
        n_embd=32,
        n_layer=2,
        n_head=4,
        vocab_size=64,
        n_positions=64,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
    ),
}
HYBRIDS: dict[str, Callable[[], Any]] = {
    "gated delta rule": lambda: Qwen3NextConfig(**SMALL, **SMALL_HYBRID),
    "short convolution and windows": lambda: tiny_config("lfm3"),
}
LENGTHS: dict[str, list[list[int]]] = {
    "uneven": [[3, 20, 1], [31, 5], [2]],
    "short": [[2], [1, 3], [2, 2]],
    "none on a rank": [[9, 30], [0, 0], [11]],
    "many": [[40, 33, 12], [25, 1, 60], [38]],
}
"""Lengths of the sequences of each rank; with tokens_per_rank=64 "many" takes several
micro-batches."""


def padded_batch(lengths: Sequence[int], side: str, rank: int) -> dict[str, Tensor]:
    """A padded batch of random tokens, with labels for all but the first token of a sequence."""
    generator = torch.Generator().manual_seed(rank)
    columns = max(lengths) + 3
    input_ids_BL = torch.randint(3, 64, (len(lengths), columns), generator=generator)
    mask_BL = torch.zeros_like(input_ids_BL)
    labels_BL = torch.full_like(input_ids_BL, -100)
    for sequence, length in enumerate(lengths):
        first = {"left": columns - length, "right": 0, "both": sequence % 3}[side]
        mask_BL[sequence, first : first + length] = 1
        labels_BL[sequence, first + 1 : first + length] = input_ids_BL[
            sequence, first + 1 : first + length
        ]
    return {"input_ids": input_ids_BL, "attention_mask": mask_BL, "labels": labels_BL}


def small_model(name: str, attention: str, loader: Any = AutoModelForCausalLM) -> PreTrainedModel:
    torch.manual_seed(5)
    model: PreTrainedModel = loader.from_config(
        {**CONFIGS, **HYBRIDS}[name](), attn_implementation=attention
    )
    return model


def outputs_and_gradients(model: PreTrainedModel, batch: dict[str, Tensor]) -> tuple[Any, Tensor]:
    """The outputs for a batch, and the gradients of the sum of all ranks' losses."""
    outputs = model(**batch, output_hidden_states=True)
    has_targets = bool((batch["labels"] != -100).any())
    (outputs.loss if has_targets else outputs.logits.sum() * 0).backward()
    gradient = torch.cat(
        [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    )
    dist.all_reduce(gradient)
    return outputs, gradient


def compare_with_stock(
    name: str, lengths_of_ranks: list[list[int]], side: str, settings: dict[str, Any]
) -> None:
    rank = dist.get_rank()
    batch = padded_batch(lengths_of_ranks[rank], side, rank)
    expected, expected_gradient = outputs_and_gradients(small_model(name, "eager"), batch)
    model = small_model(name, "distca")
    config = DistCAConfig(tokens_per_rank=64, exchange_timeout=30.0, **with_planning(settings))
    dispatcher = pack_padded(model, config, torch.device("cpu"))
    try:
        outputs, gradient = outputs_and_gradients(model, batch)
        is_token_BL = batch["attention_mask"].bool()
        if bool((batch["labels"] != -100).any()):
            torch.testing.assert_close(outputs.loss, expected.loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradient, expected_gradient, rtol=2e-4, atol=2e-6)
        torch.testing.assert_close(
            outputs.logits[is_token_BL], expected.logits[is_token_BL], rtol=1e-4, atol=1e-5
        )
        for hidden, expected_hidden in zip(
            outputs.hidden_states, expected.hidden_states, strict=True
        ):
            torch.testing.assert_close(
                hidden[is_token_BL], expected_hidden[is_token_BL], rtol=1e-4, atol=1e-5
            )
        assert torch.count_nonzero(outputs.hidden_states[-1][~is_token_BL]) == 0
        assert outputs.past_key_values is None
    finally:
        dispatcher.close()


CUT = {"document_layout": "fixed", "balance_tolerance": 0.01}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_outputs_and_gradients_are_those_of_each_padded_batch(
    rank_pools: dict[int, RankPool], ranks: int, lengths: str
) -> None:
    rank_pools[ranks].run(compare_with_stock, "llama", LENGTHS[lengths][:ranks], "both", CUT)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_kinds_of_models_and_sides_of_padding(
    rank_pools: dict[int, RankPool], name: str, side: str
) -> None:
    settings = {"device_profile": "cpu"}
    rank_pools[2].run(compare_with_stock, name, LENGTHS["uneven"][:2], side, settings)


def classify(lengths_of_ranks: list[list[int]]) -> None:
    """Compare pooled logits of a sequence classifier, such as a reward model, without gradients."""
    rank = dist.get_rank()
    batch = {**padded_batch(lengths_of_ranks[rank], "right", rank)}
    del batch["labels"]
    batch["input_ids"] = batch["input_ids"].masked_fill(
        batch["attention_mask"] == 0, SMALL["pad_token_id"]
    )
    stock = small_model("llama", "sdpa", AutoModelForSequenceClassification)
    model = small_model("llama", "distca", AutoModelForSequenceClassification)
    dispatcher = pack_padded(
        model, DistCAConfig(tokens_per_rank=64, **with_planning(CUT)), torch.device("cpu")
    )
    try:
        with torch.no_grad():
            torch.testing.assert_close(
                model(**batch).logits, stock(**batch).logits, rtol=1e-4, atol=1e-5
            )
    finally:
        dispatcher.close()


def test_a_classifier_reads_the_last_token_of_each_sequence(
    rank_pools: dict[int, RankPool],
) -> None:
    rank_pools[2].run(classify, LENGTHS["uneven"][:2])


@pytest.mark.parametrize(("planning", "ranks"), [(None, 512), ({"pod_ranks": 8}, 8)])
def test_padded_batches_are_planned_by_many_ranks_together(
    planning: dict[str, int] | None, ranks: int
) -> None:
    config = DistCAConfig(tokens_per_rank=64, planning=planning)
    dispatcher = pack_padded(small_model("llama", "distca"), config, torch.device("cpu"))
    dispatcher.close()
    assert dispatcher.run.plans.pod_ranks == ranks


def generate_on_one_rank() -> None:
    """Generation is no collective call: rank 0 generates alone."""
    model = small_model("llama", "distca")
    dispatcher = pack_padded(model, DistCAConfig(tokens_per_rank=64), torch.device("cpu"))
    try:
        if dist.get_rank() == 0:
            prompt = torch.tensor([[3, 9, 27]])
            options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
            expected = small_model("llama", "sdpa").generate(prompt, **options)
            for use_cache in (True, False):
                assert torch.equal(model.generate(prompt, use_cache=use_cache, **options), expected)
            # A user's own loop, with a cache.
            token = prompt
            cache = None
            for _ in range(4):
                outputs = model(token, past_key_values=cache, use_cache=True)
                token = outputs.logits[:, -1:].argmax(-1)
                cache = outputs.past_key_values
                prompt = torch.cat([prompt, token], 1)
            assert torch.equal(prompt, expected)
            # A user who catches an error of `generate` goes on training.
            with pytest.raises(ValueError, match="max_new_tokens"):
                model.generate(prompt, max_new_tokens=0)
            assert model.base_model.packs
    finally:
        dispatcher.close()


def test_generation_is_unchanged(rank_pools: dict[int, RankPool]) -> None:
    rank_pools[2].run(generate_on_one_rank)


def forward_only_plans(folder: str) -> None:
    """Planned by costs, batches without gradients get plans of their own; a choice of a forward
    takes less time.
    """
    model = small_model("llama", "distca")
    batch = padded_batch([5, 30, 9], "left", dist.get_rank())
    dispatcher = pack_padded(
        model, DistCAConfig(tokens_per_rank=64), torch.device("cpu"), folder=Path(folder)
    )
    seconds = []
    bind = dispatcher.bind

    def noted(plan: Any) -> Any:
        seconds.append(plan.choice.seconds)
        return bind(plan)

    dispatcher.bind = noted
    trained_on: list[PackedBatch] = []
    model.base_model.batches = PaddedBatches(dispatcher, trained_on.append)
    try:
        trained = model(**batch)
        with torch.no_grad():
            for _ in range(2):  # a plan, and the same one again
                torch.testing.assert_close(model(**batch).logits, trained.logits)
        assert len(trained_on) == 1
    finally:
        dispatcher.close()
    assert seconds[1] == seconds[2] < 0.7 * seconds[0]


def test_plans_without_gradients_are_of_a_forward(
    rank_pools: dict[int, RankPool], tmp_path: Path
) -> None:
    rank_pools[2].run(forward_only_plans, str(tmp_path))


@dataclass(frozen=True)
class Counted:
    """What the ranks did for batches that were planned ahead."""

    plans: tuple[int, ...]  # made until all were planned, packed once, packed again, and a new one
    exchanges: int  # of lengths, for all of that
    goes_on: bool  # whether later batches were planned while the first one was computed


def plan_before_packing(batches_ahead: int) -> Counted:
    """Plan batches ahead, and compute them as batches that are not planned ahead."""
    rank = dist.get_rank()
    lengths = [[3 + number, 20, 1 + rank] for number in range(batches_ahead)]
    given = [padded_batch(of_batch, "left", rank) for of_batch in lengths]
    model = small_model("llama", "distca")
    dispatcher = pack_padded(model, DistCAConfig(tokens_per_rank=64), torch.device("cpu"))
    expected = [model(**batch).logits for batch in given]
    model.base_model.batches = PaddedBatches(dispatcher)
    first_computed = threading.Event()
    in_time: list[bool] = []
    plans: list[Any] = []

    def noted(*args: Any) -> PlannedPadding:
        if plans:  # the first one is waited for
            in_time.append(first_computed.wait(20))
            first_computed.set()  # waits once at most
        plans.append(args)
        return plan_padded(*args)

    def computed() -> int:
        for batch, logits in zip(given, expected, strict=True):
            torch.testing.assert_close(model(**batch).logits, logits)
            first_computed.set()
        return len(plans)

    groups = dispatcher.groups
    exchange = groups.all_gather_in_pod
    try:
        with (
            patch.object(padded_rows, "plan_padded", noted),
            patch.object(groups, "all_gather_in_pod", side_effect=exchange) as exchanges,
        ):
            plan_ahead(model, given)
            once, again = computed(), computed()
            model(**padded_batch([9], "right", rank))
        return Counted((once, again, len(plans)), exchanges.call_count, all(in_time))
    finally:
        dispatcher.close()


def test_later_batches_are_planned_while_earlier_ones_are_computed(rank_pools):
    # More batches than plans are kept of by default.
    batches = padded_rows.PLANS_KEPT + 1
    expected = Counted((batches, batches, batches + 1), 1 + 2 * batches + 1, goes_on=True)
    assert rank_pools[2].run(plan_before_packing, batches) == [expected] * 2


def message_ahead(change: Callable[[dict[str, Tensor]], dict[str, Any]]) -> tuple[str, str]:
    """Where batches are planned ahead and where they are packed, the error on this rank."""
    model = small_model("llama", "distca")
    dispatcher = pack_padded(model, DistCAConfig(tokens_per_rank=64), torch.device("cpu"))
    batch: dict[str, Any] = padded_batch([5, 4], "right", dist.get_rank())
    del batch["labels"]
    messages = []
    try:
        if dist.get_rank() == 1:
            batch = change(batch)
        for call in (lambda: plan_ahead(model, [batch]), lambda: model(**batch)):
            try:
                call()
                messages.append("")
            except ValueError as error:
                messages.append(str(error))
        return messages[0], messages[1]
    finally:
        dispatcher.close()


def test_batches_that_cannot_be_planned_are_refused_on_both_ranks(rank_pools):
    for ahead, packed in rank_pools[2].run(message_ahead, with_holes):
        assert "the mask of sequence 0 of a padded batch has 4 tokens" in ahead
        assert packed == ahead
    for ahead, packed in rank_pools[2].run(message_ahead, with_long_sequence):
        assert ahead == ""  # other batches may be computed before
        assert "a sequence of a padded batch has 200 tokens" in packed


def with_holes(batch: dict[str, Tensor]) -> dict[str, Any]:
    batch["attention_mask"][0, 2] = 0
    return batch


def with_embeddings(batch: dict[str, Tensor]) -> dict[str, Any]:
    return {"inputs_embeds": torch.zeros(2, 4, 32), "attention_mask": torch.ones(2, 4)}


def with_mask_of_four_dimensions(batch: dict[str, Tensor]) -> dict[str, Any]:
    return {**batch, "attention_mask": torch.ones(1, 1, 4, 4)}


def with_unknown_token(batch: dict[str, Tensor]) -> dict[str, Any]:
    batch["input_ids"][1, 1] = 64
    return batch


def with_masks(batch: dict[str, Tensor]) -> dict[str, Any]:
    return {**batch, "attention_mask": {"full_attention": None}}


def with_label(batch: dict[str, Tensor]) -> dict[str, Any]:
    batch["input_ids"][1, 0] = -100
    return batch


def with_long_sequence(batch: dict[str, Tensor]) -> dict[str, Any]:
    return {"input_ids": torch.ones(1, 200, dtype=torch.long)}


def with_images(batch: dict[str, Tensor]) -> dict[str, Any]:
    return {**batch, "pixel_values": torch.zeros(1, 3, 8, 8)}


def message_of(change: Callable[[dict[str, Tensor]], dict[str, Any]]) -> str:
    """The error on this rank where only rank 1's batch is changed."""
    model = small_model("llama", "distca")
    dispatcher = pack_padded(model, DistCAConfig(tokens_per_rank=64), torch.device("cpu"))
    batch: dict[str, Any] = padded_batch([5, 4], "right", dist.get_rank())
    del batch["labels"]
    try:
        if dist.get_rank() == 1:
            batch = change(batch)
        with pytest.raises(ValueError, match="padded batch") as caught:
            model.base_model(**batch)
        return str(caught.value)
    finally:
        dispatcher.close()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            with_holes,
            "the mask of sequence 0 of a padded batch has 4 tokens from column 0 to column 4, "
            "but a sequence",
        ),
        (with_embeddings, "a padded batch has no input_ids [B, L], but ranks exchange token ids"),
        (
            with_mask_of_four_dimensions,
            "the attention_mask of a padded batch is of the shape (1, 1, 4, 4), but only",
        ),
        (with_masks, "the attention_mask of a padded batch is of the type dict, but only"),
        (with_label, "sequence 1 of a padded batch has the token id -100, but token ids begin at"),
        (
            with_unknown_token,
            "sequence 1 of a padded batch has the token id 64, but the model's embedding has",
        ),
        (
            with_long_sequence,
            "a sequence of a padded batch has 200 tokens, but all ranks together may hold 128 "
            "tokens",
        ),
        (
            with_images,
            "the model is called with pixel_values of the shape (1, 3, 8, 8) beside a padded batch "
            "(2, 8)",
        ),
    ],
)
def test_both_ranks_refuse_what_cannot_be_packed(
    rank_pools: dict[int, RankPool],
    change: Callable[[dict[str, Tensor]], dict[str, Any]],
    sentence: str,
) -> None:
    for message in rank_pools[2].run(message_of, change):
        assert sentence in message


def test_no_micro_batch_holds_more_than_all_ranks() -> None:
    """Of 256 tokens two micro-batches of 128 could hold all, but not these sequences whole: 100,
    100 and 56.
    """
    settings = PlanSettings(2, 64, (SMALL_KIND,))
    planned = plan_padded([[100], [100, 56]], settings)
    assert sorted(int(plan.tokens.sum()) for plan in planned.sequences.plans) == [56, 100, 100]
    planned = plan_padded([[100], [28, 100, 28]], settings)
    assert sorted(int(plan.tokens.sum()) for plan in planned.sequences.plans) == [128, 128]


PARTS = (12, 8, 1, 5, 9)
"""Tokens of the parts of prefixes, one after another."""
TREES = (
    ((1, 6), (2, 10), (2, 1)),
    ((5, 0), (5, 7), (1, 6)),
    ((4, 3), (0, 3), (3, 2)),
)
"""Sequences of three ranks: so many of the first parts, and then tokens of their own. Two sequences
are equal, and one is a prefix of another."""
TREE_TOKENS = [sum(sum(PARTS[:parts]) + own for parts, own in trees) for trees in TREES]


def batch_with_prefixes(rank: int, side: str = "right") -> dict[str, Tensor]:
    """Sequences with equal prefixes, on this rank and on others, over up to five levels."""
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(3, 64, (sum(PARTS),), generator=generator)
    input_ids_BL = torch.zeros(len(TREES[rank]), 44, dtype=torch.long)
    mask_BL = torch.zeros_like(input_ids_BL)
    for sequence, (parts, own) in enumerate(TREES[rank]):
        prefix = text[: sum(PARTS[:parts])]
        draw = torch.Generator().manual_seed(own)
        tokens = torch.cat([prefix, torch.randint(3, 64, (own,), generator=draw)])
        first = 44 - len(tokens) if side == "left" else 0
        input_ids_BL[sequence, first : first + len(tokens)] = tokens
        mask_BL[sequence, first : first + len(tokens)] = 1
    labels_BL = torch.where(mask_BL == 1, input_ids_BL, -100)
    labels_BL[mask_BL.cumsum(1) == 1] = -100
    return {"input_ids": input_ids_BL, "attention_mask": mask_BL, "labels": labels_BL}


def compare_shared_with_stock(
    name: str,
    block: int,
    settings: dict[str, Any],
    *,
    lora: bool = False,
    checkpointing: bool = False,
    side: str = "right",
) -> tuple[int, int, int]:
    """Compare with stock attention.

    Returns:
        Rows that were not computed, rows that were, and the number of stages.
    """
    batch = batch_with_prefixes(dist.get_rank(), side)
    model, stock = small_model(name, "distca"), small_model(name, "eager")
    config = DistCAConfig(
        tokens_per_rank=64,
        device_profile="cpu",
        exchange_timeout=30.0,
        **with_planning(settings),
    )
    dispatcher = pack_padded(model, config, torch.device("cpu"))
    batches: PaddedBatches = backbone(model).batches
    if lora:
        model, stock = with_lora(model), with_lora(stock)
    if checkpointing:
        enable_checkpointing(model.train(), {"use_reentrant": False})
    stages = []
    bind = dispatcher.bind

    def noted(plan: Any) -> Any:
        bound = bind(plan)
        stages.append(bound.stages)
        return bound

    dispatcher.bind = noted  # type: ignore[method-assign]
    try:
        expected, expected_gradient = outputs_and_gradients(stock, batch)
        with patch.object(prefixes, "BLOCK", block):
            outputs, gradient = outputs_and_gradients(model, batch)
            sequences = next(iter(batches._plans.values())).result().sequences
        is_token_BL = batch["attention_mask"].bool()
        torch.testing.assert_close(outputs.loss, expected.loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradient, expected_gradient, rtol=2e-4, atol=2e-6)
        for one, other in zip(outputs.hidden_states, expected.hidden_states, strict=True):
            torch.testing.assert_close(one[is_token_BL], other[is_token_BL], rtol=1e-4, atol=1e-5)
        return sequences.shared_rows, sequences.computed_rows, max(stages)
    finally:
        dispatcher.close()


IN_STAGES = {"exchange_buffer_bytes": 512}
ON_TWO_NODES = {"ranks_per_node": "1,2"}
WITH_LORA = ("llama", "windows", "chunks", "sinks")
"""Models whose layers have the names that `with_lora` adapts."""


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", [*CONFIGS, *HYBRIDS])
def test_equal_prefixes_are_computed_once(rank_pools, name, ranks, subtests):
    for block, settings, options in (
        (5, {}, {"checkpointing": True}),
        (4, {"document_layout": "fixed", "balance_tolerance": 0.01}, {"checkpointing": True}),
        (5, {**CUT, "ping_pong": True}, {}),
        (4, {**CUT, "ping_pong": False, **IN_STAGES}, {"checkpointing": True}),
        (3, {**CUT, **IN_STAGES, **(ON_TWO_NODES if ranks == 3 else {})}, {}),
        (4, CUT, {"lora": name in WITH_LORA}),
    ):
        with subtests.test(f"blocks of {block}", **settings, **options):
            results = rank_pools[ranks].run(
                partial(compare_shared_with_stock, **options), name, block, settings
            )
            shared, computed, stages = results[0]
            assert results == [results[0]] * ranks
            assert shared + computed == sum(TREE_TOKENS[:ranks])
            assert shared >= 20 * ranks
            assert (stages > 1) is ("exchange_buffer_bytes" in settings)


def share_with_left_padding() -> dict[str, tuple[int, int]]:
    """By model, the rows that are not computed with unequal padding before and after sequences."""
    return {
        name: tuple(
            compare_shared_with_stock(name, 4, {}, side=side)[0] for side in ("left", "right")
        )
        for name in ("llama", "windows", "learned positions")
    }


def test_sequences_with_unequal_left_padding_share_prefixes(rank_pools):
    (shared, _) = rank_pools[2].run(share_with_left_padding)
    left, right = shared.pop("learned positions")
    assert left < right  # most first tokens are in different columns
    for left, right in shared.values():
        assert left == right > 0


def noise_of(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """NEFTune's noise on the embeddings of all tokens, [tokens, H]."""
    is_token_BL = batch["attention_mask"].bool()
    embeddings: Any = model.get_input_embeddings()
    outputs = model(**batch, output_hidden_states=True)
    return (outputs.hidden_states[0] - embeddings.weight[batch["input_ids"]]).detach()[is_token_BL]


def compare_noise() -> tuple[float, float, float]:
    """NEFTune's noise in one padded batch beside stock: the largest value, and the mean absolute
    value, each over that of stock. Then the largest value in a batch of other ranks' columns.
    """
    lengths = [[60] * 8, [20, 100]][dist.get_rank()]
    batch = padded_batch(lengths, "left", 0)
    batch["input_ids"].fill_(7)  # equal prefixes, which are shared without noise
    model, stock = small_model("llama", "distca"), small_model("llama", "eager")
    dispatcher = pack_padded(model, DistCAConfig(tokens_per_rank=512), torch.device("cpu"))
    handles = [activate_neftune(of_strategy, 5.0) for of_strategy in (model, stock)]
    try:
        torch.manual_seed(dist.get_rank())
        with patch.object(prefixes, "BLOCK", 4):
            noise, expected = noise_of(model.train(), batch), noise_of(stock.train(), batch)
            plan = next(iter(backbone(model).batches._plans.values())).result()
        assert plan.sequences.shared_rows == 0
        assert not noise_of(model.eval(), batch).any()
        handles[0].remove()
        assert not noise_of(model.train(), batch).any()
        return (
            float(noise.abs().max() / expected.abs().max()),
            float(noise.abs().mean() / expected.abs().mean()),
            float(expected.abs().max()),
        )
    finally:
        dispatcher.close()


def test_noise_is_as_large_as_in_the_padded_batch_of_each_sequence(rank_pools):
    by_rank = rank_pools[2].run(compare_noise)
    for largest, mean, _ in by_rank:
        assert largest == pytest.approx(1, rel=0.01)
        assert mean == pytest.approx(1, rel=0.05)
    assert by_rank[0][2] > 1.2 * by_rank[1][2]  # 63 columns, and 103


def refused_head() -> None:
    model = small_model("llama", "distca", AutoModelForQuestionAnswering)
    with refused(Models.READS_PADDING, model=type(model).__name__, loss="ForQuestionAnswering"):
        pack_padded(model, DistCAConfig(tokens_per_rank=64), torch.device("cpu"))


def test_heads_that_read_padding_are_refused(rank_pools):
    rank_pools[1].run(refused_head)


def message_of_opt(calls_backbone: bool) -> str | None:
    """The error of a model whose head calls the decoder in its backbone, and not the backbone."""
    model = small_model_of("opt", "distca", word_embed_proj_dim=32)
    dispatcher = pack_padded(model, DistCAConfig(tokens_per_rank=64), torch.device("cpu"))
    batch: dict[str, Any] = padded_batch([5, 4], "right", dist.get_rank())
    del batch["labels"]
    try:
        (model.base_model if calls_backbone else model)(**batch)
    except RefusedError as error:
        return str(error)
    finally:
        dispatcher.close()
    return None


def test_heads_that_pass_the_backbone_by_are_refused_on_all_ranks(rank_pools):
    assert rank_pools[2].run(message_of_opt, True) == [None, None]
    for message in rank_pools[2].run(message_of_opt, False):
        assert message.startswith(
            "OPTForCausalLM computed a padded batch without its backbone OPTModel, but"
        )


def test_prefixes_are_not_shared_if_not_wanted(rank_pools):
    settings = {"share_prefixes": False}
    assert rank_pools[1].run(compare_shared_with_stock, "llama", 4, settings) == [(0, 69, 1)]


DBRX = {
    "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
    "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_jitter_eps": 0.01},
}


@pytest.mark.parametrize(
    ("model_type", "config", "reason"),
    [
        ("llama", {}, None),
        ("gpt2", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, None),
        ("gpt2", {"resid_pdrop": 0.2}, "the dropout transformer.drop draws"),
        ("opt", {"dropout": 0.1, "word_embed_proj_dim": 32}, "dropout=0.1 draws"),
        ("mixtral", {"router_jitter_noise": 0.01}, "router_jitter_noise=0.01 draws"),
        ("dbrx", DBRX, "moe_jitter_eps=0.01 draws"),
        ("qwen3_next", SMALL_HYBRID, None),
        (
            "jamba",
            {"attn_layer_period": 2, "attn_layer_offset": 1},
            "documents of JambaMambaMixer stay whole",
        ),
        ("llama", {"rope_parameters": LONGROPE}, "rotary embeddings depend on the length"),
    ],
)
def test_where_sharing_would_change_results_it_is_off_and_logged_once(
    model_type, config, reason, caplog
):
    model = small_model_of(model_type, **config)
    info_once.cache_clear()  # of other tests in this process
    caplog.set_level("INFO", logger="hf_distca")
    for rank in (0, 0, 1):
        reason_of_model = why_sequences_share_nothing(model)
        assert shares_prefixes(True, reason_of_model, rank) is (reason is None)
    messages = [record.message for record in caplog.records if "shared" in record.message]
    assert len(messages) == (0 if reason is None else 1)
    assert reason is None or reason in messages[0]
