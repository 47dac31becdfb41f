"""DistCAMixin over a trainer with an __init__, arguments and methods of its own, as TRL's SFTTrainer has them."""

from dataclasses import dataclass, field
from typing import Any

import datasets
import pytest
import torch
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

import hf_distca
from hf_distca.trainer.refusals import ARGUMENTS, GIVEN, given_arguments
from tests.models_and_batches import random_documents, reference_step, small_model
from tests.refused import refused
from tests.trainer.small_trainers import LENGTHS, make_trainer


@dataclass
class ChatArguments(TrainingArguments):
    """Arguments of ChatTrainer."""

    end_of_turn: int = field(default=2, metadata={"help": "The token behind every example."})
    learning_rate: float = field(default=0.0, metadata={"help": "None."})


class ChatTrainer(Trainer):
    """Makes examples of turns, takes the loss from logits, and counts what it is asked for."""

    def __init__(
        self,
        model: torch.nn.Module,
        args: ChatArguments,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        turns: str = "input_ids",
        **others: Any,
    ) -> None:
        assert isinstance(args, ChatArguments)
        self.calls: list[str] = []
        self.turns, self.end_of_turn = turns, args.end_of_turn
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=self.with_ends(train_dataset),
            eval_dataset=self.with_ends(eval_dataset),
            **others,
        )
        self._metrics: list[float] = []

    def with_ends(self, dataset: Any) -> Any:
        """Examples with the token behind them, and a column that no model takes."""
        return dataset.map(lambda row: {"input_ids": [*row[self.turns], self.end_of_turn], "roles": "user"})

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = ["input_ids", "labels"]

    def get_train_dataloader(self) -> Any:
        self.calls.append("train loader")
        return super().get_train_dataloader()

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        inputs["use_cache"] = False
        logits_TV = model(**{name: x for name, x in inputs.items() if name != "labels"}).logits[0]
        targets_T = torch.nn.functional.pad(inputs["labels"][0, 1:], (0, 1), value=-100)
        targets_T = inputs["shift_labels"][0] if "shift_labels" in inputs else targets_T
        count = (targets_T != -100).sum() if num_items_in_batch is None else num_items_in_batch
        loss = torch.nn.functional.cross_entropy(logits_TV.float(), targets_T, reduction="sum") / count
        self._metrics.append(float(count))
        return loss * self.accelerator.num_processes

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        assert prediction_loss_only
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            return self.compute_loss(model, inputs), None, None

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("step")
        return super().training_step(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        logs["targets"] = sum(self._metrics)
        self._metrics.clear()
        super().log(logs, start_time)


@dataclass
class PlannedChatArguments(hf_distca.DistCAArguments, ChatArguments):
    """Both trainers' arguments in one."""


class PlannedChatTrainer(hf_distca.DistCAMixin, ChatTrainer):
    """A chat trainer with planned attention."""


CLASSES = (PlannedChatTrainer, PlannedChatArguments)


def _one_step_of_everything(folder: str, source: str, **arguments: Any) -> tuple[dict, dict, list[str]]:
    trainer = make_trainer(
        folder,
        source,
        classes=CLASSES,
        max_steps=1,
        gradient_accumulation_steps=8,
        save_strategy="no",
        **arguments,
    )
    trainer.train()
    return trainer.state.log_history[0], trainer.evaluate(), trainer.calls


def reference_loss() -> float:
    documents, end = random_documents(LENGTHS), torch.tensor([2])
    return reference_step(small_model(implementation="sdpa"), [torch.cat([document, end]) for document in documents])[
        0
    ]


@pytest.mark.parametrize("source", ["packed", "flattened"])
def test_losses_are_the_trainers_own(rank_pools, tmp_path, source):
    loss = reference_loss()
    for logged, evaluation, calls in rank_pools[2].run(_one_step_of_everything, str(tmp_path), source):
        assert logged["loss"] == pytest.approx(loss, rel=1e-6)
        assert logged["distca/imbalance_degree"] >= 1.0
        assert logged["targets"] > 0.0
        # Its evaluation leaves the number of targets out, and would give each rank's mean.
        assert evaluation["eval_loss"] == pytest.approx(loss, rel=1e-6)
        assert calls[0] == "train loader"
        assert set(calls[1:]) == {"step"}


def test_arguments_are_of_both():
    names = set(PlannedChatArguments.__dataclass_fields__)
    assert {"tokens_per_rank", "end_of_turn", "learning_rate", "output_dir"} <= names
    arguments = PlannedChatArguments(output_dir="out", use_cpu=True, end_of_turn=5)
    assert (arguments.learning_rate, arguments.dataloader_num_workers, arguments.end_of_turn) == (0.0, 1, 5)
    with pytest.raises(ValueError, match="tokens_per_rank must be positive"):
        PlannedChatArguments(output_dir="out", use_cpu=True, tokens_per_rank=0)
    with refused(ARGUMENTS[3]):
        PlannedChatArguments(output_dir="out", use_cpu=True, dataloader_drop_last=True)


def test_arguments_without_the_mixin(tmp_path):
    dataset = datasets.Dataset.from_dict({"input_ids": [[1, 2]]})
    with refused(GIVEN[1]):
        PlannedChatTrainer(small_model(), ChatArguments(output_dir=str(tmp_path), use_cpu=True), None, dataset)


class Opaque(Trainer):
    """Takes what it does not know."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class PlannedOpaque(hf_distca.DistCAMixin, Opaque):
    """Behind a trainer whose arguments have no names."""


def test_arguments_by_position(tmp_path):
    def init(model: Any, args: Any = None, data_collator: Any = None, *, callbacks: Any = None) -> None: ...

    given = given_arguments(PlannedChatTrainer, init, (1, 2), {"callbacks": 3})
    assert given.named == {"model": 1, "args": 2, "callbacks": 3}
    arguments = PlannedChatArguments(output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=4)
    dataset = datasets.Dataset.from_dict({"input_ids": [[1, 2]]})
    # The collator is seen by position too: without one the batch size would be refused.
    PlannedChatTrainer(small_model(), arguments, DataCollatorWithFlattening(), dataset, dataset)
    with pytest.raises(TypeError, match="takes 0 positional arguments, got 2; pass the others by name"):
        PlannedOpaque(small_model(), arguments)
