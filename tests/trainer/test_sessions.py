"""Trainings on sessions whose documents share prefixes, against stock attention without sharing."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import numpy as np
import peft
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM, LlamaModel, TrainerCallback
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import hf_distca
from hf_distca.checks.setting_names import CHECKPOINTING
from hf_distca.collator import collation
from hf_distca.collator.collation import TARGET_ROWS
from hf_distca.dispatch import host_copies
from hf_distca.dispatch.host_copies import Copies
from hf_distca.models.sharing import why_training_shares_nothing
from hf_distca.patches import targets
from hf_distca.trainer import loaders
from tests.late_streams import LateStreams
from tests.models_and_batches import exchanging, small_model, with_planning
from tests.trainer.chats import tokenizer
from tests.trainer.comparison import HYBRID, QUIET, STRATEGIES, Run, launched, whole
from tests.trainer.sessions import IGNORED, sessions
from tests.trainer.small_trainers import make_trainer, parameters_hash

COMMON: dict[str, Any] = {
    **QUIET,
    "learning_rate": 0.0,
    "max_grad_norm": 1e9,
    "max_steps": 2,
    "bf16": False,
    "balance_block_size": 8,
    "loss_chunk_bytes": 4096,
}
LORA = {"r": 4, "target_modules": ["q_proj", "up_proj"], "init_lora_weights": False}


class Step(NamedTuple):
    """An optimizer step."""

    loss: float
    gradients: dict[str, Tensor]
    documents: list[int]  # in the data set
    shared_rows: int
    nano_batches: list[int]  # of each micro-batch
    layers_in_turns: float  # share of the layers


@dataclass(frozen=True)
class Training:
    """What is set in a training."""

    arguments: Mapping[str, Any]
    sft: bool = False
    lora: bool = False
    strategy: str = "ddp"
    model: Mapping[str, Any] = field(default_factory=dict)  # of its config
    compiles: bool = False  # MLPs

    def with_arguments(self, **arguments: Any) -> "Training":
        return replace(self, arguments={**arguments, **self.arguments})

    def make_model(self, implementation: str) -> Any:
        # The checkpoints of all layers but the last two can go to the host.
        layers = {} if self.model else {"num_hidden_layers": 3}
        model = small_model(implementation=implementation, **layers, **self.model)
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # a state lasts for a document
                torch.nn.init.uniform_(parameter, -4.5, -2.5)
        if not self.lora:
            return model
        torch.manual_seed(0)
        return peft.get_peft_model(model, peft.LoraConfig(**LORA))

    def planned_model(self, folder: str) -> Any:
        """Return this rank's model: a part of it under tensor parallelism."""
        divided = STRATEGIES[self.strategy].divided
        run = Run(model=self.make_model)
        torch._dynamo.reset()
        model: Any = run.make_model("distca", divided, f"{folder}/model")
        for layer in model.model.layers if self.compiles else ():
            layer.mlp.compile(backend="eager")
        return model


class Gradients(TrainerCallback):
    """Notes gradients and losses."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor]] = []
        self.losses: list[float] = []
        self.layers_in_turns: list[float] = []

    def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
        """Take the gradients of all trained weights."""
        self.gradients.append(
            {
                name.replace("_checkpoint_wrapped_module.", ""): whole(weight.grad)
                for name, weight in model.named_parameters()
                if weight.grad is not None
            }
        )

    def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
        """Take the loss, and the share of layers that ran in turns."""
        if "loss" in logs:
            self.losses.append(logs["loss"])
            self.layers_in_turns.append(logs["distca/ping_pong_share"])


def trained(folder: str, training: Training) -> list[Step]:
    """The steps of a rank's training."""
    unset_hf_deepspeed_config()
    model = training.planned_model(folder)
    settings = {**COMMON, **exchanging(model), "output_dir": folder}
    settings |= training.arguments
    classes: Any = (hf_distca.DistCATrainer, hf_distca.DistCATrainingArguments)
    given: dict[str, Any] = {"model": model, "train_dataset": sessions()}
    if training.sft:
        classes = (hf_distca.DistCASFTTrainer, hf_distca.DistCASFTConfig)
        given["processing_class"] = tokenizer()
    read: list[collation.PlannedDocuments] = []
    noted = Gradients()
    streams = LateStreams()
    with launched(training.strategy, {}) as patch:
        patch.setattr(host_copies, "Copies", lambda device, _: Copies(device, streams))
        plan = collation.RankDocuments.__getitem__
        patch.setattr(
            collation.RankDocuments,
            "__getitem__",
            lambda documents, batch: (read.append(plan(documents, batch)), read[-1])[1],
        )
        trainer = classes[0](args=classes[1](**with_planning(settings)), callbacks=[noted], **given)
        trainer.train()
        trainer.close()
    offloads = settings.get("offload_activations", False)
    assert (streams.moved["host"] > 0) is offloads
    count = trainer.args.gradient_accumulation_steps
    steps = []
    logged = zip(noted.losses, noted.gradients, noted.layers_in_turns, strict=True)
    for number, (loss, gradients, layers_in_turns) in enumerate(logged):
        documents_of_step = read[number * count : (number + 1) * count]
        documents = np.concatenate(
            [batch.spans["document"] for batch in documents_of_step]
        ).tolist()
        shared_rows = sum(batch.plan.shared_rows for batch in documents_of_step)
        nano_batches = [len(batch.plan.nano_batches) for batch in documents_of_step]
        steps.append(Step(loss, gradients, documents, shared_rows, nano_batches, layers_in_turns))
    return steps


def without_sharing(
    documents: Sequence[int], training: Training
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of documents, each computed by itself with stock attention."""
    model = training.make_model("sdpa")
    examples = [sessions()[document] for document in documents]
    labels = [torch.tensor(example["labels"])[1:] for example in examples]
    count = sum(int((of_document != IGNORED).sum()) for of_document in labels)
    total = 0.0
    for example, of_document in zip(examples, labels, strict=True):
        logits = model(torch.tensor([example["input_ids"]])).logits[0, :-1]
        loss = cross_entropy(logits, of_document, reduction="sum") / count
        loss.backward()
        total += float(loss.detach())
    return total, {
        name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None
    }


def error(gradients: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest error of a gradient, relative to the largest gradient of the weight."""
    assert gradients.keys() == expected.keys()
    return max(
        float((gradients[name] - expected[name]).abs().max() / expected[name].abs().max())
        for name in expected
    )


def assert_equals_no_sharing(step: Step, training: Training) -> None:
    """Check that a step equals its documents computed without sharing."""
    loss, gradients = without_sharing(step.documents, training)
    assert step.loss == pytest.approx(loss, rel=1e-5)
    assert error(step.gradients, gradients) < 2e-4


@pytest.mark.parametrize(
    ("ranks", "training"),
    [
        (1, Training({"tokens_per_rank": 2400})),
        (2, Training({"tokens_per_rank": 700, "gradient_accumulation_steps": 2})),
        (2, Training({"tokens_per_rank": 1200, CHECKPOINTING: True}, sft=True)),
        (3, Training({"tokens_per_rank": 500, CHECKPOINTING: False})),
    ],
    ids=["one rank", "accumulated", "sft", "three ranks"],
)
def test_steps_equal_those_without_sharing(rank_pools, tmp_path, ranks, training):
    results = rank_pools[ranks].run(trained, str(tmp_path), training)
    for step in results[0]:
        assert step.shared_rows > 0
        assert_equals_no_sharing(step, training)
    documents_of_steps = [step.documents for step in results[0]]
    assert all([step.documents for step in result] == documents_of_steps for result in results)


IN_TURNS: dict[str, Any] = {
    "tokens_per_rank": 900,
    "train_sampling_strategy": "sequential",
    "max_steps": 1,
}
"""Arguments of a step whose documents share rows in two nano-batches, on two ranks."""


LINEAR = "linear_attention"
HYBRID_OF_THREE = {
    **HYBRID,
    "num_hidden_layers": 3,
    "layer_types": [LINEAR, "full_attention", LINEAR],
    "router_aux_loss_coef": 0.0,
}
"""No loss of it counts rows, and the checkpoint of its first layer can go to the host."""
ACCUMULATED = {"gradient_accumulation_steps": 2}
OFFLOADED = {CHECKPOINTING: True, "offload_activations": True}
EXACT = {
    "documents": Training({}),
    "sft": Training({}, sft=True),
    "documents, checkpoints, accumulated": Training({CHECKPOINTING: True, **ACCUMULATED}),
    "sft, LoRA, checkpoints on the host": Training(OFFLOADED, sft=True, lora=True),
    "documents, LoRA, checkpoints on the host, fsdp2": Training(
        {**OFFLOADED, **ACCUMULATED}, lora=True, strategy="fsdp2"
    ),
    "sft, fsdp2": Training({}, sft=True, strategy="fsdp2"),
    "documents, tensor parallelism": Training(ACCUMULATED, strategy="tp and fsdp"),
    "documents, compiled MLPs": Training({}, compiles=True),
    "documents, hybrid, checkpoints on the host": Training(OFFLOADED, model=HYBRID_OF_THREE),
    "sft, hybrid, fsdp2": Training({}, sft=True, model=HYBRID_OF_THREE, strategy="fsdp2"),
}
ROUNDED = {
    "documents, accumulated": Training(ACCUMULATED),
    "sft, LoRA, checkpoints on the host, fsdp2": Training(
        {**OFFLOADED, **ACCUMULATED}, sft=True, lora=True, strategy="fsdp2"
    ),
}
"""Trainings in bfloat16."""


def assert_shared_in_turns(step: Step) -> None:
    """Check that rows are shared, and that two nano-batches took turns in each micro-batch."""
    assert step.shared_rows > 0
    assert set(step.nano_batches) == {2}
    assert step.layers_in_turns == 1


@pytest.mark.parametrize("name", EXACT)
def test_nano_batches_take_turns(rank_pools, tmp_path, name):
    """There are more targets than rows, and layers divide their arguments by rows."""
    training = EXACT[name].with_arguments(**IN_TURNS)
    pool = rank_pools[STRATEGIES[training.strategy].ranks]
    (step,) = pool.run(trained, str(tmp_path), training)[0]
    assert_shared_in_turns(step)
    assert_equals_no_sharing(step, training)


@pytest.mark.parametrize("name", ROUNDED)
def test_nano_batches_take_turns_in_bfloat16(rank_pools, tmp_path, name):
    """Rows are shared as exactly as bfloat16 computes them anyway."""
    errors = {}
    for shares in (True, False):
        training = ROUNDED[name].with_arguments(**IN_TURNS, bf16=True, share_prefixes=shares)
        (step,) = rank_pools[2].run(trained, str(tmp_path), training)[0]
        if shares:
            assert_shared_in_turns(step)
        loss, gradients = without_sharing(step.documents, training)
        assert step.loss == pytest.approx(loss, rel=1e-3)
        errors[shares] = error(step.gradients, gradients)
    assert errors[True] < 2 * errors[False]


def resumed(folder: str) -> tuple[str, str, str, dict[str, Any]]:
    """Weights after four steps, after two and two more; an error; and the place in the data."""
    data = sessions()

    def trainer(name: str, **arguments: Any) -> Any:
        settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
        given = {"train_dataset": data}
        return make_trainer(
            f"{folder}/{name}", given=given, **{"tokens_per_rank": 500, **settings, **arguments}
        )

    through = trainer("a")
    through.train()
    place = json.loads(Path(f"{folder}/a/checkpoint-2/data_order.json").read_text())
    stopped = trainer("b")
    stopped.train(f"{folder}/a/checkpoint-2")
    message = ""
    try:
        trainer("c", share_prefixes=False).train(f"{folder}/a/checkpoint-2")
    except ValueError as error:
        message = str(error)
    return parameters_hash(through.model), parameters_hash(stopped.model), message, place


def test_a_training_resumes_with_the_same_prefix_trees(rank_pools, tmp_path):
    for through, again, message, place in rank_pools[2].run(resumed, str(tmp_path)):
        assert through == again
        assert "share_prefixes is False, but must be True" in message
        assert place["order"]["share_prefixes"] is True
        assert place["steps"] == 2


def test_documents_with_nothing_in_common_are_planned_as_ever(tmp_path, monkeypatch):
    read = MagicMock()
    monkeypatch.setattr(loaders, "block_hashes", read)
    planned = {}
    for shares in (True, False):
        trainer = make_trainer(str(tmp_path), share_prefixes=shares)
        batches = iter(trainer.get_train_dataloader())
        planned[shares] = [
            (batch["input_ids"].tolist(), batch["labels"].tolist(), TARGET_ROWS in batch)
            for batch in batches
        ]
        assert trainer._shares == shares
        assert trainer._loaders.prefixes(trainer.train_dataset, shares=shares) is None
        assert type(trainer.model.base_model).forward is LlamaModel.forward
    assert planned[True] == planned[False]
    assert not any(has_rows for *_, has_rows in planned[True])
    read.assert_not_called()


class OwnLoss(hf_distca.DistCATrainer):
    """A trainer with a loss of its own."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Do as before."""
        return super().compute_loss(*args, **kwargs)


class OwnHead(LlamaForCausalLM):
    """A model with a loss of its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Do as before."""
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda trainer: None, None),
        (lambda trainer: setattr(trainer.args, "neftune_noise_alpha", 5.0), "neftune_noise_alpha"),
        (lambda trainer: setattr(trainer, "aux_loss_enabled", True), "auxiliary loss"),
        (
            lambda trainer: setattr(trainer, "model", small_model().model),
            "no decoder",
        ),
        (lambda trainer: setattr(trainer.model, "__class__", OwnHead), "OwnHead.forward"),
        (lambda trainer: setattr(trainer, "__class__", OwnLoss), "OwnLoss.compute_loss"),
        (lambda trainer: setattr(trainer.model.config, "attention_dropout", 0.1), "dropout=0.1"),
    ],
    ids=["shared", "neftune", "experts", "no decoder", "own head", "own loss", "dropout"],
)
def test_documents_share_nothing_where_sharing_would_change_results(tmp_path, change, reason):
    trainer = make_trainer(str(tmp_path), lengths=[30])
    change(trainer)
    assert (reason or "None") in str(why_training_shares_nothing(trainer))


@pytest.mark.parametrize("source", ["list", "transform"])
def test_documents_that_may_change_are_not_shared(tmp_path, source):
    trainer = make_trainer(str(tmp_path), source, lengths=[200])
    # Equal documents, if only they were stored.
    trainer.train_dataset = data = [trainer.train_dataset[0]] * 2
    assert trainer._loaders.prefixes(data, shares=True) is None


def test_evaluations_predictions_and_streams_share_no_prefixes(tmp_path, monkeypatch):
    data = sessions()
    given = {"train_dataset": data, "eval_dataset": data}
    trainer = make_trainer(
        str(tmp_path),
        given=given,
        tokens_per_rank=2400,
        max_steps=1,
        save_strategy="no",
        learning_rate=0.0,
        prediction_loss_only=True,
    )
    trainer.train()
    (logged,) = [entry for entry in trainer.state.log_history if "distca/shared_rows" in entry]
    assert logged["distca/shared_rows"] > 0
    plan = collation.RankDocuments.__getitem__
    read: list[collation.PlannedDocuments] = []
    monkeypatch.setattr(
        collation.RankDocuments,
        "__getitem__",
        lambda documents, batch: (read.append(plan(documents, batch)), read[-1])[1],
    )
    loss, _ = without_sharing(range(len(data)), Training({}, model={"num_hidden_layers": 2}))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-5)
    assert trainer.predict(data).metrics["test_loss"] == pytest.approx(loss, rel=1e-5)
    assert len(read) > 1
    assert not any(batch.sequences.shared_rows for batch in read)
    assert trainer._loaders.prefixes(data, shares=True) is not None
    assert trainer._loaders.prefixes(data.to_iterable_dataset(), shares=True) is None


def test_gradients_of_repeated_rows_are_added():
    hidden = torch.arange(6.0).view(1, 3, 2).requires_grad_()
    rows = [torch.tensor([2, 0]), torch.tensor([2])]
    selected = targets._selected(hidden, rows)
    assert selected.tolist() == [[[4.0, 5.0], [0.0, 1.0], [4.0, 5.0]]]
    selected.backward(torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]]))
    assert hidden.grad.tolist() == [[[3.0, 4.0], [0.0, 0.0], [6.0, 8.0]]]
