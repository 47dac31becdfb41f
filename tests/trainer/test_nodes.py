"""Four ranks on two nodes of two train as users do, beside one process with "sdpa"."""

from pathlib import Path
from typing import Any

import accelerate
import pytest

from hf_distca.dispatch.dispatcher import Dispatcher
from tests.trainer import train_script
from tests.trainer.launches import BF16, LAUNCHED, LENGTHS, TOKENS_PER_RANK, reference_run

STEPS = 2
RUN: dict[str, Any] = {
    "lora": True,
    "lengths": LENGTHS,
    "calls": ["train"],
    # As many tokens together as two ranks have in the launches.
    "arguments": {
        **BF16,
        "max_steps": STEPS,
        "tokens_per_rank": TOKENS_PER_RANK // 2,
        "exchange_buffer_bytes": 8192,  # 128 rows
        "ranks_per_node": 2,
    },
}


def _train(folder: str) -> tuple[dict[str, Any], list[bool]]:
    """The result of the run, and for each of its plans whether ranks pass rows on."""
    forwards: list[bool] = []
    bind = Dispatcher.bind

    def recorded_bind(self: Dispatcher, plan: Any) -> Any:
        bound = bind(self, plan)
        forwards.append(any(routes.forwards for nano in bound.nano_batches for routes in nano.routes.values()))
        return bound

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Dispatcher, "bind", recorded_bind)
        patch.delenv("ACCELERATE_USE_CPU", raising=False)
        for name, value in LAUNCHED["fsdp2"].items():
            patch.setenv(name, value)
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        run = {**RUN, "arguments": {**RUN["arguments"], "output_dir": folder}}
        result = train_script.train(train_script.make_model(RUN), run, Path(folder))
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return result, forwards


def test_ranks_on_nodes_train_as_one_process(rank_pools, tmp_path):
    of_two_ranks = {**RUN["arguments"], "tokens_per_rank": TOKENS_PER_RANK}  # as many tokens as four have here
    expected = reference_run({**RUN, "arguments": of_two_ranks})["losses"]
    for result, forwards in rank_pools[4].run(_train, str(tmp_path)):
        assert "FSDP" in result["distributed_type"]
        assert sum(forwards) > STEPS
        history = result["history"]
        assert max(entry.get("distca/ping_pong_share", 0.0) for entry in history) > 0.0
        assert max(entry.get("distca/exchange_stages", 0.0) for entry in history) > 1.0
        assert max(entry.get("distca/exchange_bytes_between_nodes", 0.0) for entry in history) > 0.0
        assert result["losses"] == pytest.approx(expected, rel=8e-3)  # as in test_launch.py
