"""DistCATrainer on one and two ranks: exact losses from every source of data."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers.integrations.integration_utils import rewrite_logs

from hf_distca.checks.data_rules import Data
from hf_distca.checks.run_rules import Run
from hf_distca.trainer import assembly
from hf_distca.trainer.metrics import NO_TARGETS, PREFIX
from tests.models_and_batches import random_documents, reference_step, small_model
from tests.patches.test_rotary import DYNAMIC, LONGROPE, WIDE
from tests.refused import refused
from tests.trainer.features import install_liger
from tests.trainer.small_trainers import LENGTHS, make_trainer


def _one_step_of_everything(
    folder: str, source: str, arguments: dict[str, Any]
) -> tuple[list[dict], dict, int]:
    """One optimizer step over all documents, and an evaluation on them before it."""
    step = {
        "max_steps": 1,
        "learning_rate": 0.0,
        "save_strategy": "no",
        "gradient_accumulation_steps": 8,
    }
    batches = (
        {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
        if source == "flattened"
        else {}
    )
    planned = {"document_layout": "auto"} if source == "packed" else {}
    trainer = make_trainer(folder, source, **{**step, **batches, **planned, **arguments})
    if planned:  # documents are divided, where by their costs such short ones would stay whole
        trainer.dispatcher.choose_by(None)
    trainer.train()
    evaluation = trainer.evaluate()
    assert not trainer.meter.figures()  # which are of training alone
    return trainer.state.log_history, evaluation, trainer.args.world_size


def figures_of(documents: list[Tensor], model: Any = None) -> tuple[float, float]:
    """Return the share of tokens that a model with stock attention would have chosen, and the mean
    entropy in nats.
    """
    model = model or small_model(implementation="sdpa")
    correct = 0
    targets = 0
    entropy = 0.0
    for document in documents:
        with torch.no_grad():
            logits = model(document[None]).logits[0]
        correct += int((logits.argmax(-1)[:-1] == document[1:]).sum())
        log_probs = logits[:-1].double().log_softmax(-1)
        entropy -= float((log_probs.exp() * log_probs).sum())
        targets += len(document) - 1
    assert correct > 0
    return correct / targets, entropy / targets


@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        ("packed", {"dataloader_num_workers": 2}),
        ("stream", {}),
        ("flattened", {}),
        # Three micro-batches of two documents on each of two ranks: batch_rebalance fills up what
        # is not full.
        (
            "flattened",
            {"train_sampling_strategy": "group_by_length", "gradient_accumulation_steps": 3},
        ),
        (
            "flattened",
            {"train_sampling_strategy": "batch_rebalance", "gradient_accumulation_steps": 3},
        ),
    ],
)
def test_loss_is_that_of_all_documents(rank_pools, tmp_path, source, arguments):
    loss, _ = reference_step(small_model(implementation="sdpa"), random_documents(LENGTHS))
    results = rank_pools[2].run(_one_step_of_everything, str(tmp_path), source, arguments)
    for history, evaluation, world_size in results:
        assert world_size == 2
        assert history[0]["loss"] == pytest.approx(loss, rel=1e-6)
        assert evaluation["eval_loss"] == pytest.approx(loss, rel=1e-6)
        accuracy, entropy = figures_of(random_documents(LENGTHS))
        assert evaluation["eval_mean_token_accuracy"] == accuracy
        assert evaluation["eval_entropy"] == pytest.approx(entropy, rel=1e-6)
    if source != "packed":
        return
    logged, of_other_rank = (history[0] for history, *_ in results)
    figures = {
        name.removeprefix(PREFIX): figure
        for name, figure in logged.items()
        if name.startswith(PREFIX)
    }
    # Planned evenly, so that the busiest rank should take hardly more than the mean.
    assert (
        0.5 * figures["attention_ms"]
        <= figures["attention_ms_predicted"]
        < 1.05 * figures["attention_ms"]
    )
    assert of_other_rank["distca/attention_ms"] == figures["attention_ms"]
    assert 1.0 <= figures["imbalance_degree"] < 1.05 < figures["imbalance_degree_packed"]
    assert (
        min(
            figures[name]
            for name in ("tokens_per_second", "exchange_bytes", "exchange_wait_seconds")
        )
        > 0
    )
    assert (
        rewrite_logs(logged)["train/distca/imbalance_degree"] == figures["imbalance_degree"]
    )  # as trackers show it


ROTARY = {
    "longrope": {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 280}},
    "dynamic": {"rope_parameters": DYNAMIC, "max_position_embeddings": 200},
}
"""Rotary embeddings with other frequencies for a document of 300 tokens than for one of 100."""


def _losses_beyond(folder: str, kind: str) -> list[float]:
    """Losses of a training step, and of evaluations of its documents and of the short one."""
    model = small_model("llama", **WIDE, **ROTARY[kind])
    step = {
        "max_steps": 1,
        "learning_rate": 0.0,
        "gradient_accumulation_steps": 1,
        "save_strategy": "no",
    }
    planned = {
        "tokens_per_rank": 400 // dist.get_world_size(),
        "document_layout": "fixed",
        "ping_pong": False,
    }
    trainer = make_trainer(folder, model=model, lengths=[300, 100], **step, **planned)
    trainer.train()
    # On one rank both documents lie in one row; on two ranks the long document is cut.
    (batch,) = trainer.get_train_dataloader()
    assert batch["distca_plan"].tokens.tolist() == (
        [400] if dist.get_world_size() == 1 else [200, 200]
    )
    short = trainer.eval_dataset.select([1])
    losses = [trainer.evaluate(data)["eval_loss"] for data in (trainer.eval_dataset, short)]
    return [trainer.state.log_history[0]["loss"], *losses]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ROTARY)
def test_a_document_is_rotated_by_its_own_length(rank_pools, tmp_path, kind, ranks):
    documents = random_documents([300, 100])
    stock = small_model("llama", "sdpa", **WIDE, **ROTARY[kind])
    short, both = (
        reference_step(stock, documents_of_step)[0]
        for documents_of_step in (documents[1:], documents)
    )
    for losses in rank_pools[ranks].run(_losses_beyond, str(tmp_path), kind):
        assert losses == pytest.approx([both, both, short], rel=1e-6)


@pytest.mark.parametrize("source", ["packed", "list", "stream", "transform"])
def test_columns(tmp_path, source):
    """Columns that the model does not take are left out or refused; lengths are checked."""
    loss, _ = reference_step(small_model(implementation="sdpa"), random_documents(LENGTHS))
    arguments = {"max_steps": 1, "gradient_accumulation_steps": 8, "save_strategy": "no"}
    columns = {"text": "words", "token_type_ids": [0]}
    trainer = make_trainer(str(tmp_path), source, columns=columns, **arguments)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss, rel=1e-6)
    with refused(Data.UNKNOWN_COLUMNS, unknown=["text"]):
        make_trainer(
            str(tmp_path),
            source,
            columns={"text": "words"},
            remove_unused_columns=False,
            **arguments,
        ).train()
    with refused(Data.WRONG_LENGTH, length=150, column="tokens", stated=4):
        make_trainer(
            str(tmp_path), source, columns={"tokens": 4}, length_column_name="tokens", **arguments
        ).train()


# With logging_nan_inf_filter 0/0 would be logged as 0, too.
WITHOUT_FILTER = {"save_strategy": "no", "logging_nan_inf_filter": False}


def test_a_data_set_without_targets_is_refused(tmp_path):
    with refused(Data.SINGLE_TOKENS, name="train_dataset", documents=3):
        make_trainer(str(tmp_path), lengths=[1, 1, 1], max_steps=1, **WITHOUT_FILTER).train()


@pytest.mark.parametrize(("source", "tokens"), [("stream", 3), ("flattened", 1)])
def test_a_step_without_targets_is_refused_where_data_are_unknown_before(tmp_path, source, tokens):
    trainer = make_trainer(str(tmp_path), source, lengths=[1, 1, 1], max_steps=1, **WITHOUT_FILTER)
    trainer.model.forward = None  # no step begins
    with refused(Run.NO_TARGETS, tokens=tokens):
        trainer.train()


@pytest.mark.parametrize(
    ("source", "lengths", "has_no_targets"),
    [
        ("packed", [1, 1, 1, 1, 1, 5, 3], [True, False, False]),
        ("stream", [5, 1, 1, 1, 1, 1, 1, 1, 1], [False, True, True]),
    ],
    ids=["first step", "later steps"],
)
def test_a_step_without_targets_of_data_that_have_some(
    tmp_path, caplog, source, lengths, has_no_targets
):
    """Micro-batches have 5, 5 and 3 tokens."""
    options = {"tokens_per_rank": 5, "learning_rate": 0.0, "train_sampling_strategy": "sequential"}
    options |= {**WITHOUT_FILTER, "max_steps": 3, "ping_pong": False}
    trainer = make_trainer(str(tmp_path), source, lengths=lengths, **options)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [loss == 0 for loss in losses] == has_no_targets
    assert [record.message for record in caplog.records].count(NO_TARGETS) == 1


def test_a_model_is_given_the_number_of_targets_as_an_integer(tmp_path):
    """FSDP2 casts floats to bfloat16, which has eight bits for a number."""
    trainer = make_trainer(str(tmp_path), max_steps=1)
    forward = trainer.model.forward
    given = []

    def noted(*args: Any, num_items_in_batch: Tensor, **kwargs: Any) -> Any:
        given.append(num_items_in_batch)
        return forward(*args, num_items_in_batch=num_items_in_batch, **kwargs)

    trainer.model.forward = noted
    trainer.train()
    assert [targets.dtype for targets in given] == [torch.int64] * len(given)
    assert given


def test_trainings_that_change_no_weight(tmp_path, caplog):
    frozen = small_model()
    frozen.requires_grad_(False)
    trainer = make_trainer(str(tmp_path), model=frozen, max_steps=1, save_strategy="no")
    with refused(Run.ALL_FROZEN, model="LlamaForCausalLM"):
        trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0
    frozen.lm_head.requires_grad_(True)
    trainer.train()
    assert "learning_rate" not in caplog.text
    make_trainer(str(tmp_path), max_steps=1, learning_rate=0.0, save_strategy="no").train()
    assert "learning_rate=0 is set, so that training changes no weight" in caplog.text


def test_evaluations_without_targets(tmp_path):
    arguments = {"max_steps": 1, **WITHOUT_FILTER}
    trainer = make_trainer(str(tmp_path), "stream", lengths=[1, 1, 1], **arguments)
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == 0.0
    assert "eval_mean_token_accuracy" not in metrics
    assert "eval_entropy" not in metrics
    # A micro-batch without targets leaves the mean of the others as it is.
    loss, _ = reference_step(small_model(implementation="sdpa"), random_documents([5]))
    evaluated = make_trainer(str(tmp_path), lengths=[5, 1], tokens_per_rank=5).evaluate()
    assert evaluated["eval_loss"] == pytest.approx(loss)


def test_the_order_of_documents(tmp_path):
    def drawn(epoch: int = 0, **arguments: Any) -> list[list[int]]:
        """The tokens of each micro-batch, on one rank."""
        loader = make_trainer(
            str(tmp_path), **{"tokens_per_rank": 200, **arguments}
        ).get_train_dataloader()
        loader.set_epoch(epoch)
        return [batch["input_ids"][0].tolist() for batch in loader]

    sequential = {"tokens_per_rank": 8, "train_sampling_strategy": "sequential", "ping_pong": False}
    first, second, third, fourth = (
        document.tolist() for document in random_documents([3, 4, 5, 6])
    )
    batches = drawn(lengths=[3, 4, 5, 6], **sequential)
    assert [sorted(batch) for batch in batches] == [
        sorted(first + second),
        sorted(third),
        sorted(fourth),
    ]
    assert drawn(1, lengths=[3, 4, 5, 6], **sequential) == batches
    assert (
        drawn(seed=1, data_seed=7)
        == drawn(seed=2, data_seed=7)
        == drawn(seed=7)
        != drawn(1, seed=7)
    )
    assert drawn(seed=7, data_seed=1) != drawn(seed=7)
    assert drawn(seed=1, data_seed=0) == drawn(seed=0)


def test_accuracy_and_entropy_are_those_of_the_evaluated_targets(tmp_path):
    documents = random_documents(LENGTHS)
    # Only targets count: here those that the model would have chosen.
    model = small_model(implementation="sdpa")
    with torch.no_grad():
        chosen = model(documents[0][None]).logits[0].argmax(-1)
    labels = [-100, *chosen[:-1].tolist()]
    labels[5:9] = [-100] * 4
    labels[9] = (labels[9] + 1) % 64
    rows = [{"input_ids": documents[0].tolist(), "labels": labels}]
    trainer = make_trainer(str(tmp_path))
    assert trainer.evaluate(rows)["eval_mean_token_accuracy"] == (len(labels) - 6) / (
        len(labels) - 5
    )


@pytest.mark.parametrize(
    "arguments",
    [{"loss_chunk_bytes": 4 * 64}, {"loss_chunk_bytes": 0}],
    ids=["one row at a time", "all logits at once"],
)
def test_accuracy_and_entropy_by_chunks_and_at_once(tmp_path, arguments):
    documents = random_documents(LENGTHS)
    # By chunks of one row, or from all logits at once.
    metrics = make_trainer(str(tmp_path), **arguments).evaluate(metric_key_prefix="mine")
    accuracy, entropy = figures_of(documents)
    assert metrics["mine_mean_token_accuracy"] == accuracy
    assert metrics["mine_entropy"] == pytest.approx(entropy, rel=1e-6)


def test_a_plan_that_reaches_no_attention(tmp_path):
    trainer = make_trainer(str(tmp_path), max_steps=1, save_strategy="no", ping_pong=False)
    forward = trainer.model.forward
    trainer.model.forward = lambda distca_plan=None, **inputs: forward(**inputs)
    with refused(Run.LOST_PLAN, model="LlamaForCausalLM", key="distca_plan"):
        trainer.train()


def test_kernels_of_the_layers_are_looked_at_before_the_model_is_prepared(tmp_path, monkeypatch):
    seen = []

    def look(model, device):
        seen.append((device.type, hasattr(model.lm_head, "chunk_bytes")))

    monkeypatch.setattr(assembly, "warn_of_kernels", look)
    make_trainer(str(tmp_path))
    assert seen == [("cpu", False)]


def test_evaluation_with_liger_makes_no_logits_either(tmp_path, monkeypatch):
    install_liger(monkeypatch)
    arguments = {
        "optim": "sgd",
        "learning_rate": 0.3,
        "loss_chunk_bytes": 4 * 64 * 20,
        "use_liger_kernel": True,
    }
    trainer = make_trainer(str(tmp_path), max_steps=2, save_strategy="no", **arguments)
    assert trainer.args.liger_kernel_config == {
        "fused_linear_cross_entropy": False,
        "cross_entropy": False,
    }
    trainer.train()
    assert "forward" in vars(trainer.model.model.norm)  # Liger's
    loss = trainer.evaluate()["eval_loss"]
    trainer.args.use_liger_kernel = False  # which asks models for no logits in evaluations
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-6)
