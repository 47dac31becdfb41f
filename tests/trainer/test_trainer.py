"""DistCATrainer on one and two ranks: exact losses from every source of data."""

from typing import Any

import pytest
import torch
from transformers.integrations.integration_utils import rewrite_logs

from hf_distca.collator.refusals import Data
from hf_distca.trainer.metrics import PREFIX
from tests.models_and_batches import random_documents, reference_step, small_model
from tests.refused import refused
from tests.trainer.features import install_liger
from tests.trainer.small_trainers import LENGTHS, make_trainer


def _one_step_of_everything(folder: str, source: str, arguments: dict[str, Any]) -> tuple[list[dict], dict, int]:
    """One optimizer step over all documents, and an evaluation on them before it."""
    step = {"max_steps": 1, "learning_rate": 0.0, "save_strategy": "no", "gradient_accumulation_steps": 8}
    batches = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2} if source == "flattened" else {}
    trainer = make_trainer(folder, source, **{**step, **batches, **arguments})
    trainer.train()
    return trainer.state.log_history, trainer.evaluate(), trainer.args.world_size


def check_logs(logged: dict[str, Any], of_other_rank: dict[str, Any]) -> None:
    figures = {name.removeprefix(PREFIX): figure for name, figure in logged.items() if name.startswith(PREFIX)}
    # Planned evenly, so that the busiest rank should take hardly more than the mean.
    assert 0.5 * figures["attention_ms"] <= figures["attention_ms_predicted"] < 1.05 * figures["attention_ms"]
    assert of_other_rank["distca/attention_ms"] == figures["attention_ms"]
    assert 1.0 <= figures["imbalance_degree"] < 1.05 < figures["imbalance_degree_packed"]
    assert min(figures[name] for name in ("tokens_per_second", "exchange_bytes", "exchange_wait_seconds")) > 0
    # All that transformers does not log itself, and as trackers show it.
    assert logged.keys() - {f"{PREFIX}{name}" for name in figures} <= {
        *("loss", "grad_norm", "learning_rate", "epoch", "step")
    }
    assert rewrite_logs(logged)["train/distca/imbalance_degree"] == figures["imbalance_degree"]


@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        ("packed", {"dataloader_num_workers": 2}),
        ("stream", {}),
        ("flattened", {}),
        # Three micro-batches of two documents on each of two ranks: batch_rebalance fills up what is not full.
        ("flattened", {"train_sampling_strategy": "group_by_length", "gradient_accumulation_steps": 3}),
        ("flattened", {"train_sampling_strategy": "batch_rebalance", "gradient_accumulation_steps": 3}),
    ],
)
def test_loss_is_that_of_all_documents(rank_pools, tmp_path, source, arguments):
    loss, _ = reference_step(small_model(implementation="sdpa"), random_documents(LENGTHS))
    results = rank_pools[2].run(_one_step_of_everything, str(tmp_path), source, arguments)
    for history, evaluation, world_size in results:
        assert world_size == 2
        assert history[0]["loss"] == pytest.approx(loss, rel=1e-6)
        assert evaluation["eval_loss"] == pytest.approx(loss, rel=1e-6)
    if source == "packed":
        check_logs(results[0][0][0], results[1][0][0])


@pytest.mark.parametrize("source", ["packed", "list", "stream", "transform"])
def test_columns(tmp_path, source):
    """Columns that the model does not take are left out, or refused; the length column is checked."""
    loss, _ = reference_step(small_model(implementation="sdpa"), random_documents(LENGTHS))
    of_step = {"max_steps": 1, "gradient_accumulation_steps": 8, "save_strategy": "no"}
    columns = {"text": "words", "token_type_ids": [0]}
    trainer = make_trainer(str(tmp_path), source, columns=columns, **of_step)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss, rel=1e-6)
    with refused(Data.UNKNOWN_COLUMNS, unknown=["text"]):
        make_trainer(str(tmp_path), source, columns={"text": "words"}, remove_unused_columns=False, **of_step).train()
    with refused(Data.WRONG_LENGTH, length=150, column="tokens", stated=4):
        make_trainer(str(tmp_path), source, columns={"tokens": 4}, length_column_name="tokens", **of_step).train()


def _share_of_turns(folder: str, hooked: bool) -> float:
    trainer = make_trainer(folder, lengths=[40] * 6, max_steps=1, save_strategy="no")
    if hooked:
        trainer.model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: None)
    trainer.train()
    return trainer.state.log_history[0]["distca/ping_pong_share"]


def test_ping_pong_share_is_of_what_ran(rank_pools, tmp_path):
    for hooked, share in ((False, 1.0), (True, 0.5)):
        assert rank_pools[2].run(_share_of_turns, str(tmp_path), hooked) == [share, share]


def test_documents_without_targets(tmp_path):
    # With logging_nan_inf_filter 0/0 would be logged as 0, too.
    arguments = {"max_steps": 1, "save_strategy": "no", "logging_nan_inf_filter": False}
    trainer = make_trainer(str(tmp_path), lengths=[1, 1, 1], **arguments)
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == 0.0
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, before[name])
    assert trainer.evaluate()["eval_loss"] == 0.0
    # A micro-batch without targets leaves the mean of the others as it is.
    loss, _ = reference_step(small_model(implementation="sdpa"), random_documents([5]))
    evaluated = make_trainer(str(tmp_path), lengths=[5, 1], tokens_per_rank=5).evaluate()
    assert evaluated["eval_loss"] == pytest.approx(loss)


def tokens_of_an_epoch(trainer: Any, epoch: int = 0) -> list[list[int]]:
    """The tokens of each micro-batch, on one rank."""
    loader = trainer.get_train_dataloader()
    loader.set_epoch(epoch)
    return [batch["input_ids"][0].tolist() for batch in loader]


def test_the_order_of_documents(tmp_path):
    sequential = {"tokens_per_rank": 8, "train_sampling_strategy": "sequential", "ping_pong": False}
    trainer = make_trainer(str(tmp_path), lengths=[3, 4, 5, 6], **sequential)
    first, second, third, fourth = (document.tolist() for document in random_documents([3, 4, 5, 6]))
    batches = tokens_of_an_epoch(trainer)
    assert [sorted(batch) for batch in batches] == [sorted(first + second), sorted(third), sorted(fourth)]
    assert tokens_of_an_epoch(trainer, epoch=1) == batches

    def drawn(**seeds: int) -> list[list[int]]:
        return tokens_of_an_epoch(make_trainer(str(tmp_path), tokens_per_rank=200, **seeds))

    assert drawn(seed=1, data_seed=7) == drawn(seed=2, data_seed=7) == drawn(seed=7)
    assert drawn(seed=7, data_seed=1) != drawn(seed=7)
    assert drawn(seed=1, data_seed=0) == drawn(seed=0)


class Deaf(torch.nn.Module):
    """Hands every keyword but the plan on to the model."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, distca_plan: Any = None, **inputs: Any) -> Any:
        return self.model(**inputs)


def test_a_plan_that_reaches_no_attention(tmp_path):
    trainer = make_trainer(str(tmp_path), max_steps=1, save_strategy="no", ping_pong=False)
    (batch,), targets = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 1, trainer.args.device)
    inputs = trainer._prepare_inputs(batch)
    with pytest.raises(ValueError, match="LlamaForCausalLM did not pass distca_plan on to its decoder layers"):
        trainer.compute_loss(Deaf(trainer.model), inputs, num_items_in_batch=targets)


def test_evaluation_with_liger_makes_no_logits_either(tmp_path, monkeypatch):
    install_liger(monkeypatch)
    arguments = {"optim": "sgd", "learning_rate": 0.3, "loss_chunk_bytes": 4 * 64 * 20, "use_liger_kernel": True}
    trainer = make_trainer(str(tmp_path), max_steps=2, save_strategy="no", **arguments)
    assert trainer.args.liger_kernel_config == {"fused_linear_cross_entropy": False, "cross_entropy": False}
    trainer.train()
    assert "forward" in vars(trainer.model.model.norm)  # Liger's
    loss = trainer.evaluate()["eval_loss"]
    trainer.args.use_liger_kernel = False  # which asks models for no logits in evaluations
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-6)
