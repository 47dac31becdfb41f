"""Models, arguments and data of DistCASFTTrainer; see `test_features.py` for its trainings."""

import sys
from typing import Any

import datasets
import pytest
import torch
import trl
from transformers import ProcessorMixin

import hf_distca
from hf_distca.checks.argument_rules import WITHOUT_SETTINGS
from hf_distca.checks.data_rules import Data
from hf_distca.checks.launch_rules import TRAINER
from hf_distca.checks.run_rules import Run
from tests.models_and_batches import exchanging, small_model, with_planning
from tests.refused import refused
from tests.trainer.chats import chats, prompts, tokenizer
from tests.trainer.comparison import launched


class WithPixels(ProcessorMixin):
    """A processor of images and text."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.chat_template = tokenizer.chat_template


@pytest.mark.filterwarnings(
    "ignore:.gradient_checkpointing:FutureWarning"
)  # of TRL's own SFTConfig
def test_models_arguments_and_data(tmp_path):
    def make(model: Any, args: Any, data: Any, processing_class: Any) -> Any:
        return hf_distca.DistCASFTTrainer(
            model, args, train_dataset=data, processing_class=processing_class
        )

    small_model().save_pretrained(tmp_path)
    options = {"use_cpu": True, "bf16": False, "report_to": []}
    args = hf_distca.DistCASFTConfig(
        str(tmp_path), **options, model_init_kwargs={"dtype": "bfloat16"}
    )
    model = make(str(tmp_path), args, chats(2), tokenizer()).model
    assert model.config._attn_implementation == "distca"
    assert model.dtype == torch.bfloat16
    for args in (
        trl.SFTConfig(str(tmp_path), **options),
        hf_distca.DistCATrainingArguments(str(tmp_path)),
    ):
        with refused(WITHOUT_SETTINGS[1]):
            make(small_model(), args, chats(2), tokenizer())
    images = chats(2).add_column("images", [[], []])
    with refused(TRAINER[3]):
        make(
            small_model(),
            hf_distca.DistCASFTConfig(str(tmp_path), **options),
            images,
            WithPixels(tokenizer()),
        )


def test_answers_that_max_length_cuts_off(tmp_path):
    options = {"use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True}

    def make(max_length: int | None, **data: Any) -> Any:
        args = hf_distca.DistCASFTConfig(str(tmp_path), **options, max_length=max_length)
        return hf_distca.DistCASFTTrainer(small_model(), args, processing_class=tokenizer(), **data)

    with refused(Data.NO_ANSWERS, name="train_dataset", examples=4, max_length=2):
        make(2, train_dataset=prompts(4))
    kept = datasets.Dataset.from_dict({"prompt": ["w1"], "completion": ["w2 w3"]})
    with refused(Data.NO_ANSWERS, name="eval_dataset['own']", examples=3, max_length=2):
        make(2, train_dataset=kept, eval_dataset={"chats": kept, "own": prompts(3)})
    assert len(make(None, train_dataset=prompts(4)).train_dataset) == 4


def _counted(folder: str) -> list[dict[str, Any]]:
    """Logs of two steps, of which the second has one token for two ranks."""
    options = {
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
    }
    options |= {"max_steps": 2, "save_strategy": "no", "train_sampling_strategy": "sequential"}
    options |= {"include_num_input_tokens_seen": True, "dataloader_pin_memory": False}
    model = small_model(implementation="distca")
    # Tokens with the id of padding are tokens of documents, too.
    documents = datasets.Dataset.from_list(
        [{"input_ids": [7, 0, 6, 8][:length]} for length in (4, 4, 4, 4, 1)]
    )
    with launched("ddp", {}):
        args = hf_distca.DistCASFTConfig(
            folder, **options, **with_planning({**exchanging(model), "tokens_per_rank": 8})
        )
        trainer = hf_distca.DistCASFTTrainer(
            model, args, train_dataset=documents, processing_class=tokenizer()
        )
        trainer.train()
        with refused(Run.NO_LOGITS_OF_TRL, trainer="DistCASFTTrainer"):
            trainer.predict(documents)
        trainer.close()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def test_what_keeps_ranks_busy_without_data_is_not_counted(rank_pools, tmp_path):
    for logged in rank_pools[2].run(_counted, str(tmp_path)):
        assert [entry["num_tokens"] for entry in logged] == [16, 17]
        assert [entry["num_input_tokens_seen"] for entry in logged] == [16, 17]


@pytest.mark.parametrize("name", ["DistCASFTTrainer", "DistCASFTConfig"])
def test_without_trl(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(sys.modules, "hf_distca.trainer.trl.sft")
    with pytest.raises(ImportError, match=r"pip install 'hf_distca\[trl\]'"):
        getattr(hf_distca, name)
