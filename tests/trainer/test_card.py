"""The model card says that hf_distca trained the model, and how."""

from pathlib import Path
from typing import Any

import datasets
import pytest
from huggingface_hub import ModelCard

import hf_distca
from tests.models_and_batches import exchanging, small_model
from tests.trainer.chats import tokenizer
from tests.trainer.comparison import launched
from tests.trainer.small_trainers import make_trainer

TRAINED = """
- Ranks: 2, under DDP
- `tokens_per_rank`: 160, so that a micro-batch has up to 320 tokens
- `document_layout`: joint
"""


def _with_card(folder: str, tags: Any) -> None:
    trainer = make_trainer(folder, document_layout="joint")
    for _ in range(2):  # as at each checkpoint that is pushed
        trainer.create_model_card(model_name="mine", tags=tags)


@pytest.mark.parametrize("tags", [None, "own", ["own", "others"]])
def test_how_the_model_was_trained(rank_pools, tmp_path, tags):
    rank_pools[2].run(_with_card, str(tmp_path), tags)
    card = ModelCard.load(tmp_path / "README.md")
    assert {"hf_distca", *([tags] if isinstance(tags, str) else tags or [])} <= set(card.data.tags)
    assert card.text.count(TRAINED) == 1
    assert f"hf_distca {hf_distca.__version__} packed" in card.text


def _with_card_of_trl(folder: str) -> None:
    model = small_model(implementation="distca")
    options = {
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "disable_tqdm": True,
        "document_layout": "joint",
    }
    documents = datasets.Dataset.from_list([{"input_ids": [7, 6, 8]}])
    with launched("ddp", {}):
        args = hf_distca.DistCASFTConfig(
            folder, **{**exchanging(model), **options, "tokens_per_rank": 160}
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
    assert card.text.count(TRAINED) == 1
