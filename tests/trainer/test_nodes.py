"""Four ranks on two nodes of two train under FSDP2 as one process does."""

from typing import Any

import pytest
from transformers import Trainer, TrainingArguments

import hf_distca
from hf_distca.dispatch.dispatcher import Dispatcher
from tests.models_and_batches import exchanging
from tests.trainer.comparison import ALONE, COMMON, LENGTHS, PLANNED, ROUNDING, TOKENS_PER_RANK, dataset_of, launched
from tests.trainer.features import Pad, adapted

BF16 = {**COMMON, "bf16": True}
ON_NODES = {
    "tokens_per_rank": TOKENS_PER_RANK // 2,  # as many tokens together as two ranks have
    "exchange_buffer_bytes": 1024,  # 16 rows
    "ranks_per_node": 2,
    "dataloader_num_workers": 0,
}
LORA = adapted(target_modules=["q_proj", "v_proj"])


def _train(folder: str) -> list[float]:
    """The losses of a training in which ranks forward rows."""
    forwards: list[bool] = []
    bind = Dispatcher.bind

    def recorded_bind(self: Dispatcher, plan: Any) -> Any:
        bound = bind(self, plan)
        forwards.append(any(routes.forwards for nano in bound.nano_batches for routes in nano.routes.values()))
        return bound

    with launched("fsdp2", {}) as patch:
        patch.setattr(Dispatcher, "bind", recorded_bind)
        model = LORA("distca")
        args = hf_distca.DistCATrainingArguments(folder, **{**BF16, **PLANNED, **exchanging(model), **ON_NODES})
        trainer = hf_distca.DistCATrainer(model=model, args=args, train_dataset=dataset_of(LENGTHS))
        trainer.train()
        assert "FSDP" in str(trainer.accelerator.distributed_type)
        trainer.close()
    assert sum(forwards) >= COMMON["max_steps"]
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    for name, least in (("ping_pong_share", 0), ("exchange_stages", 1), ("exchange_bytes_between_nodes", 0)):
        assert max(entry[f"distca/{name}"] for entry in logs) > least
    return [entry["loss"] for entry in logs]


def test_ranks_on_nodes_train_as_one_process(rank_pools, tmp_path):
    with launched("ddp", {}):
        args = TrainingArguments(str(tmp_path), **{**BF16, **ALONE})
        alone = Trainer(LORA("sdpa"), args, data_collator=Pad(), train_dataset=dataset_of(LENGTHS))
        alone.train()
    losses = [entry["loss"] for entry in alone.state.log_history if "loss" in entry]
    for of_rank in rank_pools[4].run(_train, str(tmp_path)):
        assert of_rank == pytest.approx(losses, rel=2 * ROUNDING)
