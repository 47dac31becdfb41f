"""The model card says that hf_distca trained the model, and how."""

from pathlib import Path
from typing import Any

import datasets
import pytest
from huggingface_hub import ModelCard

import hf_distca
from tests.models_and_batches import exchanging, small_model, with_planning
from tests.trainer.chats import tokenizer
from tests.trainer.comparison import launched
from tests.trainer.small_trainers import make_trainer

TRAINED = """
- Data: {}
- Ranks: 2, under DDP
- `tokens_per_rank`: 160, so that a micro-batch has up to 320 tokens
- `document_layout`: fixed
- Optimizer step: 1 micro-batch, up to 320 tokens
"""


def _with_card(folder: str, tags: Any) -> None:
    trainer = make_trainer(folder, document_layout="fixed")
    for _ in range(2):  # as at each checkpoint that is pushed
        trainer.create_model_card(model_name="mine", tags=tags)


@pytest.mark.parametrize("tags", [None, "own", ["own", "others"]])
def test_how_the_model_was_trained(rank_pools, tmp_path, tags):
    rank_pools[2].run(_with_card, str(tmp_path), tags)
    card = ModelCard.load(tmp_path / "README.md")
    assert {"hf_distca", *([tags] if isinstance(tags, str) else tags or [])} <= set(card.data.tags)
    assert card.text.count(TRAINED.format("12 documents")) == 1
    assert " on 12 documents.\n" in card.text
    assert "batch_size" not in card.text
    assert f"hf_distca {hf_distca.__version__} packed" in card.text


def _with_card_of_trl(folder: str) -> None:
    model = small_model(implementation="distca")
    options = {
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "disable_tqdm": True,
        "document_layout": "fixed",
    }
    documents = datasets.Dataset.from_list([{"input_ids": [7, 6, 8]}])
    with launched("ddp", {}):
        args = hf_distca.DistCASFTConfig(
            folder, **with_planning({**exchanging(model), **options, "tokens_per_rank": 160})
        )
        trainer = hf_distca.DistCASFTTrainer(
            model, args, train_dataset=documents, processing_class=tokenizer()
        )
        trainer.create_model_card()
        trainer.close()


def test_the_card_of_trl(rank_pools, tmp_path: Path):
    rank_pools[2].run(_with_card_of_trl, str(tmp_path))
    card = ModelCard.load(tmp_path / "README.md")
    assert {"hf_distca", "sft", "trl"} <= set(card.data.tags)
    assert card.text.count(TRAINED.format("1 document")) == 1


DATA = {
    "packed": "12 documents of 621 tokens",
    "list": "12 documents of 621 tokens",
    "stream": "a stream of documents",
    "flattened": "12 examples",
}


@pytest.mark.parametrize("source", DATA)
def test_data_and_batches_of_a_training(tmp_path: Path, source: str):
    settings = {"gradient_accumulation_steps": 2, "save_strategy": "no"}
    trainer = make_trainer(str(tmp_path), source=source, max_steps=1, **settings)
    trainer.train()
    trainer.create_model_card()
    text = ModelCard.load(tmp_path / "README.md").text
    assert f" on {DATA[source]}.\n" in text
    assert f"\n- Data: {DATA[source]}\n" in text
    # Transformers counts examples, which the micro-batches of a custom collator have.
    counts_examples = source == "flattened"
    assert ("\n- train_batch_size: 1\n" in text) is counts_examples
    assert ("\n- total_train_batch_size: 2\n" in text) is counts_examples
    step = "\n- Optimizer step: 2 micro-batches, up to 320 tokens\n"
    assert (step in f"{text}\n") is not counts_examples
    trainer.create_model_card(dataset="Stories")
    assert " on the Stories dataset.\n" in ModelCard.load(tmp_path / "README.md").text
