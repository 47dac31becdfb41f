"""DistCASFTTrainer on two ranks beside TRL's SFTTrainer in one process."""

import sys
from typing import Any

import accelerate
import peft
import pytest
import torch
import trl
from transformers import ProcessorMixin
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

import hf_distca
from hf_distca.trainer.refusals import SFT_ARGUMENTS, SFT_TRAINER
from tests.models_and_batches import exchanging, small_model
from tests.refused import refused
from tests.trainer.chats import chats, prompts, tokenizer

FOLLOWED = ("loss", "entropy", "mean_token_accuracy", "num_tokens", "grad_norm")


def make(folder: str, model: Any, data: Any, ours: bool = True, peft_config: Any = None, **arguments: Any) -> Any:
    """A trainer whose steps take all of the data.

    Args:
        folder: for its output.
        model: what is trained.
        data: to train on; also evaluated, as it is and as two data sets.
        ours: whether it is DistCASFTTrainer, or SFTTrainer with all of the data in a batch.
        peft_config: of adapters.
        arguments: of its config, and its data_collator.
    """
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    settings = {
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "dataloader_num_workers": 0,
        "logging_steps": 1,
        "max_steps": 2,
        "save_strategy": "no",
        "learning_rate": 1.0,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "bf16": False,
        "seed": 1,
    }
    if ours:
        kinds: Any = hf_distca.DistCASFTTrainer, hf_distca.DistCASFTConfig
        settings |= {"tokens_per_rank": 220, "balance_block_size": 8, "gradient_accumulation_steps": 8}
        settings |= {} if isinstance(model, str) else exchanging(model)
    else:
        kinds = trl.SFTTrainer, trl.SFTConfig
        settings |= {"per_device_train_batch_size": 99, "per_device_eval_batch_size": 99, "max_length": None}
    collator = arguments.pop("data_collator", None)
    args = kinds[1](folder, **{**settings, **arguments})
    return kinds[0](
        model=model,
        args=args,
        train_dataset=data,
        data_collator=collator,
        processing_class=tokenizer(),
        peft_config=peft_config,
    )


def followed(trainer: Any, evaluated: Any = None) -> dict[str, list[float]]:
    """What the trainer logs of its steps, and of an evaluation afterwards."""
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    found = {name: [entry[name] for entry in steps] for name in FOLLOWED}
    if evaluated is not None:
        metrics = trainer.evaluate(evaluated)
        found |= {name: [metrics[name]] for name in metrics if name.startswith("eval") and "_per_" not in name}
    return {name: values for name, values in found.items() if not name.endswith("runtime")}


def assert_same(got: dict[str, list[float]], expected: dict[str, list[float]], within: float = 1e-5) -> None:
    assert got.keys() == expected.keys()
    for name in expected:
        assert got[name] == pytest.approx(expected[name], rel=within), name


def lora() -> peft.LoraConfig:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


EXPERTS = {"model_type": "mixtral", "num_local_experts": 4, "router_aux_loss_coef": 0.1}
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "assistant": (chats, lora, {"assistant_only_loss": True, "learning_rate": 10.0, "gradient_checkpointing": False}),
    "completions": (prompts, None, {"loss_type": "dft", "max_length": 60}),
    "bfloat16": (chats, lora, {"bf16": None, "learning_rate": 10.0}),  # TRL's default
    "experts": (chats, None, {}),
}
WITHIN = {"bfloat16": 2e-3, "experts": 5e-4}
"""How far a case may lie off; experts, because their own loss is of each rank's rows."""


def run(folder: str, case: str, ours: bool = True) -> dict[str, list[float]]:
    data, adapters, arguments = CASES[case]
    config = EXPERTS if case == "experts" else {}
    model = small_model(implementation="distca" if ours else "sdpa", **config)
    trainer = make(folder, model, data(), ours, adapters and adapters(), **arguments)
    return followed(trainer, {"few": data().select(range(5)), "all": data()})


@pytest.mark.parametrize("case", CASES)
def test_losses_and_metrics_are_those_of_one_process(rank_pools, tmp_path, case):
    expected = run(str(tmp_path), case, ours=False)
    assert expected["mean_token_accuracy"][1] > 0.05
    for got in rank_pools[2].run(run, str(tmp_path), case):
        assert_same(got, expected, WITHIN.get(case, 1e-5))


STREAMED = {"max_steps": 1, "gradient_accumulation_steps": 6}
"""More micro-batches than the stream has: some are of a rank whose data has ended, or of all."""
COLLATED = {
    "max_steps": 1,
    "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": 5,
    "train_sampling_strategy": "sequential",
}


def stream_and_collator(folder: str) -> list[dict[str, list[float]]]:
    stream = make(folder, small_model(), chats().to_iterable_dataset(num_shards=2), **STREAMED)
    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    return [
        followed(stream, chats()),
        followed(make(folder, small_model(), chats(11), data_collator=collator, **COLLATED)),
    ]


def test_streams_and_collators(rank_pools, tmp_path):
    def one_step(data: Any, evaluated: Any = None) -> dict[str, list[float]]:
        model = small_model(implementation="sdpa")
        return followed(make(str(tmp_path), model, data, ours=False, max_steps=1), evaluated)

    # accelerate begins again with the first examples until all batches of a step have as many.
    collated = chats(11).select([*range(11), *range(9)])
    expected = [one_step(chats(), chats()), one_step(collated)]
    for results in rank_pools[2].run(stream_and_collator, str(tmp_path)):
        for got, wanted in zip(results, expected, strict=True):
            assert_same(got, wanted)


def test_a_model_by_name(tmp_path):
    small_model().save_pretrained(tmp_path / "model")
    trainer = make(str(tmp_path), str(tmp_path / "model"), chats(2), model_init_kwargs={"dtype": "bfloat16"})
    assert trainer.model.config._attn_implementation == "distca"
    assert trainer.model.dtype == torch.bfloat16


class WithPixels(ProcessorMixin):
    """A processor of images and text."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.chat_template = tokenizer.chat_template


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
