"""Training under `accelerate launch` with 2 processes against one process with "sdpa"."""

from pathlib import Path

import numpy as np
import pytest
import torch

from hf_distca.collator.long_documents import fit_documents
from hf_distca.collator.sampler import GlobalBatchSampler
from tests.launch import launch
from tests.models import random_documents, small_model

SCRIPT = Path(__file__).parent / "train_script.py"
LENGTHS = [150, 3, 17, 60, 1, 33, 90, 45, 7, 120, 64, 31, 28, 5, 77, 12] * 3
STEPS, ACCUMULATION, TOKENS_PER_RANK, LEARNING_RATE = 20, 2, 96, 1e-3
FEW_STEPS = 4
ARGUMENTS = {
    "max_steps": STEPS,
    "gradient_accumulation_steps": ACCUMULATION,
    "tokens_per_rank": TOKENS_PER_RANK,
    "learning_rate": LEARNING_RATE,
    "optim": "adamw_torch",
    "balance_block_size": 8,
    "dataloader_num_workers": 0,
    "save_strategy": "no",
}


def reference_losses(model_type: str = "llama", steps: int = STEPS, **config) -> list[float]:
    """The losses of ordinary training in one process, on the same global micro-batches."""
    documents = random_documents(LENGTHS)
    model = small_model(model_type, "eager" if model_type == "gemma2" else "sdpa", **config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    pieces = fit_documents(np.array(LENGTHS), 2 * TOKENS_PER_RANK, "error", "tokens")
    sampler = GlobalBatchSampler(pieces, 2 * TOKENS_PER_RANK, seed=42)
    losses: list[float] = []
    epoch = 0
    while len(losses) < steps:
        sampler.set_epoch(epoch)
        micro_batches = [micro_batch for (micro_batch,) in sampler]
        for first in range(0, len(micro_batches), ACCUMULATION):
            step = [
                documents[index]
                for micro_batch in micro_batches[first : first + ACCUMULATION]
                for index in micro_batch.pieces["document"]
            ]
            losses.append(optimizer_step(model, optimizer, step))
        epoch += 1
    return losses[:steps]


def optimizer_step(model, optimizer, documents) -> float:
    targets = sum(len(document) - 1 for document in documents)
    total = 0.0
    for document in documents:
        if len(document) > 1:
            logits = model(input_ids=document[None]).logits[0, :-1].float()
            loss = torch.nn.functional.cross_entropy(logits, document[1:], reduction="sum") / targets
            loss.backward()
            total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return total


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return reference_losses()


@pytest.mark.parametrize(
    ("strategy", "checkpointing"),
    [("ddp", False), ("zero1", False), ("zero2", True), ("fsdp2", True), ("zero3", True)],
)
def test_loss_curve_is_that_of_one_process(strategy, checkpointing, expected, tmp_path):
    arguments = ARGUMENTS | {"activation_checkpointing": checkpointing}
    result = launch(strategy, SCRIPT, {"lengths": LENGTHS, "arguments": arguments}, tmp_path)
    kind = {"ddp": "MULTI_GPU", "fsdp2": "FSDP"}.get(strategy, "DEEPSPEED")
    assert kind in result["distributed_type"].upper() or (
        strategy == "ddp" and "MULTI_CPU" in result["distributed_type"]
    )
    assert result["world_size"] == 2
    # Some micro-batches have a document of more than half of their tokens: both kinds in one run.
    shares = [entry["ping_pong_share"] for entry in result["history"] if "ping_pong_share" in entry]
    assert min(shares) < 1.0
    assert max(shares) > 0.0
    assert result["losses"] == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize(
    ("strategy", "model"),
    [
        ("ddp", {"model_type": "mistral", "sliding_window": 24}),
        ("fsdp2", {"model_type": "gemma2", "sliding_window": 24, "query_pre_attn_scalar": 8}),
        ("zero3", {"model_type": "mixtral", "num_local_experts": 4}),
    ],
    ids=["ddp-mistral", "fsdp2-gemma2", "zero3-mixtral"],
)
def test_other_architectures(strategy, model, tmp_path):
    arguments = ARGUMENTS | {"max_steps": FEW_STEPS, "activation_checkpointing": strategy != "ddp"}
    result = launch(strategy, SCRIPT, {"lengths": LENGTHS, "arguments": arguments, "model": model}, tmp_path)
    assert max(entry.get("ping_pong_share", 0.0) for entry in result["history"]) > 0.0
    assert result["losses"] == pytest.approx(reference_losses(steps=FEW_STEPS, **model), rel=2e-5)
