"""Data sets with images in `hf-distca simulate` and `hf-distca plan`."""

import pytest
import transformers

from tests.images.families import tiny_model
from tests.images.pictures import chats, processor

COUNTS = [2, 0, 3, 1, 1, 0, 6, 0]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory) -> dict[str, str]:
    """Folders of a model that sees images, of chats with pictures, and of processed documents."""
    folder = tmp_path_factory.mktemp("images")
    config = tiny_model("qwen3_vl", "sdpa").config
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    config.save_pretrained(folder / "model")
    chats(COUNTS).save_to_disk(folder / "chats")
    return {name: str(folder / name) for name in ("model", "chats")}


@pytest.fixture(autouse=True)
def tiny_processor(monkeypatch):
    without_padding = processor()
    without_padding.tokenizer.pad_token = None  # as that of many checkpoints
    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", lambda name: without_padding)


def of(seeing: dict[str, str], command: str, *more: str) -> list[str]:
    sizes = ["--ranks", "2", "--tokens-per-rank", "256"]
    return [command, "--lengths", seeing["chats"], "--model", seeing["model"], *sizes, *more]


def test_strategies_are_compared_with_their_encoders(figures, seeing, without_memory):
    simulation = figures(*of(seeing, "simulate", "--batches", "4"))
    assert simulation["images"] > 0
    assert simulation["patches"] > 4 * simulation["images"]
    strategies = {strategy["name"]: strategy for strategy in simulation["strategies"]}
    means = {name: strategy["encoder_mean_seconds"] for name, strategy in strategies.items()}
    chosen = strategies["hf_distca, chosen"]
    # Each image is encoded once under each strategy.
    assert list(means.values()) == pytest.approx([chosen["encoder_mean_seconds"]] * len(means))
    packed = strategies["plain packing"]
    assert chosen["encoder_seconds"] < packed["encoder_seconds"]
    assert chosen["encoder_patches"] < packed["encoder_patches"]
    assert packed["step_seconds"] > packed["attention_mean_seconds"] + packed["other_mean_seconds"]


def test_the_table_has_encoders(run, seeing, without_memory):
    printed = run(*of(seeing, "simulate", "--batches", "1"))[1]
    assert " images; " in printed or " images, " in printed
    assert "step = encoder + attention + other + waits + idle." in printed
    assert "encoder max/mean" in printed


def test_memory_has_the_encoder(figures, seeing):
    counted = figures(*of(seeing, "plan", "--strategy", "ddp", "--device-memory", "1"))
    assert counted["images"]["images"] > 0
    assert 1 <= counted["images"]["max_over_mean"] < 1.5
    without, with_checkpoints = (
        counted["memory"]["ddp"][name]["parts"]["encoder"]
        for name in ("without_checkpointing", "with_checkpointing")
    )
    assert 0 < with_checkpoints < without


def test_a_model_without_an_encoder(run, seeing, tmp_path):
    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=2, vocab_size=100
    )
    config.save_pretrained(tmp_path)
    _, _, error = run(*of({**seeing, "model": str(tmp_path)}, "simulate"))
    assert "has images, but the images of" in error
