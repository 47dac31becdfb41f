"""Padded batches with images of each family, packed on two ranks, beside the stock model."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import hf_distca
from hf_distca.checks.refusal import RefusedError
from hf_distca.planner import prefixes
from tests.images.families import CONFIGS, GRIDS, IMAGE, documents, tiny_model

COUNTS = {"pictures on both ranks": ((2, 0, 1), (1, 3, 0)), "pictures on one": ((0, 0), (2, 1))}
"""Numbers of images of the sequences of each rank."""
CAPACITIES = (400, 90)
"""Tokens per rank: for one micro-batch, and for several."""


def padded(family: str, counts: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """A batch as a processor makes it. Each sequence comes with other pixels, and with other last
    tokens, too."""
    examples = documents(family, counts)
    examples += [
        {**example, "pixel_values": -example["pixel_values"]}
        for example in examples
        if "pixel_values" in example
    ]
    examples += [
        {**example, "input_ids": [*example["input_ids"][:-1], 7, 9]} for example in examples
    ]
    lengths = [len(example["input_ids"]) for example in examples]
    ids = torch.zeros(len(examples), max(lengths), dtype=torch.long)
    for row, example in zip(ids, examples, strict=True):
        row[: len(example["input_ids"])] = torch.tensor(example["input_ids"])
    batch = {"input_ids": ids}
    batch["attention_mask"] = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    for name in ("pixel_values", "image_grid_thw", "image_sizes"):
        parts = [torch.as_tensor(example[name]) for example in examples if name in example]
        if parts:
            batch[name] = torch.cat(parts)
    if family in GRIDS:
        batch["mm_token_type_ids"] = (ids == IMAGE).int()
    return batch


def loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A loss that reads each token's logits."""
    logits = model(**batch).logits
    weights = torch.linspace(-1, 1, logits.shape[-1])
    return (logits.log_softmax(-1) @ weights * batch["attention_mask"]).square().sum()


def compare(family: str, counts: tuple[tuple[int, ...], ...]) -> list[int]:
    """Compare the loss and the gradients of this rank's batch with each capacity, and count rows
    that are shared.
    """
    batches = [padded(family, of_rank) for of_rank in counts]
    stock = tiny_model(family, "sdpa")
    losses = [loss(stock, batch) for batch in batches]
    sum(losses).backward()
    batch, expected = batches[dist.get_rank()], losses[dist.get_rank()].detach()
    return [compare_packed(family, batch, stock, expected, tokens) for tokens in CAPACITIES]


def compare_packed(
    family: str,
    batch: dict[str, torch.Tensor],
    stock: Any,
    expected_loss: torch.Tensor,
    tokens_per_rank: int,
) -> int:
    """Compare with the gradients of a stock model, and count rows that are shared."""
    model = tiny_model(family, "distca")
    config = hf_distca.DistCAConfig(
        tokens_per_rank=tokens_per_rank, document_layout="fixed", planning={"balance_block_size": 8}
    )
    shared = []
    with patch.multiple(prefixes, BLOCK=4, LEAST_SAVED=0.0):
        dispatcher = hf_distca.pack_padded(model, config, torch.device("cpu"))
        bind = dispatcher.bind

        def noted(plan: Any) -> Any:
            shared.append(plan.shared_rows)
            return bind(plan)

        dispatcher.bind = noted  # type: ignore[method-assign]
        found = loss(model, batch)
        found.backward()
    torch.testing.assert_close(found.detach(), expected_loss, rtol=1e-5, atol=1e-4)
    for (name, weight), expected in zip(model.named_parameters(), stock.parameters(), strict=True):
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        dist.all_reduce(gradient)
        if expected.grad is None:
            assert not gradient.any(), name
            continue
        error = (gradient - expected.grad).abs().max() / expected.grad.abs().max().clamp(min=0.1)
        assert error < 1e-4, (name, error)
    dispatcher.close()
    return sum(shared)


@pytest.mark.parametrize("ranks_with_pictures", COUNTS)
@pytest.mark.parametrize("family", CONFIGS)
def test_families(rank_pools, family, ranks_with_pictures):
    shared = rank_pools[2].run(compare, family, COUNTS[ranks_with_pictures])
    assert shared[0] == shared[1]
    assert min(shared[0]) > 0


def refuse(cut: bool) -> None:
    """Rank 1 has a batch whose placeholders do not fit its images; every rank says so."""
    model = tiny_model("qwen3_vl", "distca")
    config = hf_distca.DistCAConfig(tokens_per_rank=200)
    dispatcher = hf_distca.pack_padded(model, config, torch.device("cpu"))
    batch = padded("qwen3_vl", (1, 1))
    if dist.get_rank() == 1:
        first, second = batch["input_ids"][:2]
        last = int((first == IMAGE).nonzero()[-1])
        first[last] = 5
        if cut:
            second[0] = IMAGE
    message = "an image of sequence 0" if cut else "tokens of the id"
    with pytest.raises(RefusedError, match=message):
        model(**batch)
    dispatcher.close()


@pytest.mark.parametrize("cut", [False, True])
def test_placeholders_that_do_not_fit(rank_pools, cut):
    rank_pools[2].run(refuse, cut)
