"""Models, arguments and data of DistCASFTTrainer; see `test_features.py` for its trainings."""

import sys
from typing import Any

import pytest
import torch
import trl
from transformers import ProcessorMixin

import hf_distca
from hf_distca.trainer.refusals import SFT_ARGUMENTS, SFT_TRAINER
from tests.models_and_batches import small_model
from tests.refused import refused
from tests.trainer.chats import chats, tokenizer


class WithPixels(ProcessorMixin):
    """A processor of images and text."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.chat_template = tokenizer.chat_template


def test_a_model_by_name(tmp_path):
    small_model().save_pretrained(tmp_path)
    options = {"use_cpu": True, "bf16": False, "report_to": [], "model_init_kwargs": {"dtype": "bfloat16"}}
    args = hf_distca.DistCASFTConfig(str(tmp_path), **options)
    trainer = hf_distca.DistCASFTTrainer(str(tmp_path), args, train_dataset=chats(2), processing_class=tokenizer())
    assert trainer.model.config._attn_implementation == "distca"
    assert trainer.model.dtype == torch.bfloat16


def test_arguments_and_data_that_are_refused(tmp_path):
    for args in (trl.SFTConfig(str(tmp_path), use_cpu=True), hf_distca.DistCATrainingArguments(str(tmp_path))):
        with refused(SFT_ARGUMENTS[0]):
            hf_distca.DistCASFTTrainer(small_model(), args, train_dataset=chats(2), processing_class=tokenizer())
    args = hf_distca.DistCASFTConfig(str(tmp_path), use_cpu=True, bf16=False, report_to=[])
    images = chats(2).add_column("images", [[], []])
    with refused(SFT_TRAINER[1]):
        hf_distca.DistCASFTTrainer(small_model(), args, train_dataset=images, processing_class=WithPixels(tokenizer()))


def test_without_trl(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(sys.modules, "hf_distca.trainer.sft")
    for name in ("DistCASFTTrainer", "DistCASFTConfig"):
        with pytest.raises(ImportError, match=r"pip install 'hf_distca\[trl\]'"):
            getattr(hf_distca, name)
