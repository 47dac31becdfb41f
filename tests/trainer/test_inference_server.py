"""Rollouts of an inference server or of an engine beside the training; stand-ins for vLLM."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.ranks import RankPool
from tests.trainer import preferences, recorded
from tests.trainer.inference_server import StandIn, without_vllm

WITHIN = 1e-4
"""Largest relative difference of a logged figure or of what a weight has learned, in float32."""
VLLM = {"use_vllm": True, "max_steps": 2, "num_generations": 2, "max_completion_length": 24}
CASES = {
    "server": preferences.Case("grpo", arguments={**VLLM, "vllm_mode": "server"}),
    "server, fsdp2": preferences.Case("grpo", "fsdp2", {**VLLM, "vllm_mode": "server"}),
    "colocate": preferences.Case(
        "grpo", arguments={**VLLM, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True}
    ),
}


def without_transfer() -> dict[str, Any]:
    """TRL makes the transfer to the server itself."""
    return {"weight_transfer": None}


def train(folder: str, case: Any, planned: bool) -> dict[str, Any]:
    """A training, what the server was asked for, and the weights that it and the engine got."""
    stand_in = StandIn()
    with without_vllm(stand_in) as engines:
        asynchronous = isinstance(case, recorded.Case)
        place = {"vllm_server_base_url": stand_in.url}
        case = replace(case, arguments={**case.arguments, **place})
        result = (recorded if asynchronous else preferences).train(folder, case, planned)
        for engine in engines:
            stand_in.requests += engine.calls
            stand_in.weights |= engine.weights
        return result | {
            "requests": stand_in.requests,
            "announced": stand_in.announced,
            "received": stand_in.weights,
        }


def check_received(trained: dict[str, Any], expected: dict[str, Any], path: str) -> None:
    """The server was asked for the same, and got the same weights, by transformers' names."""
    assert trained["requests"] == expected["requests"]
    assert trained["announced"] == expected["announced"]
    stock = AutoModelForCausalLM.from_pretrained(path)
    names = [name for name, _ in stock.named_parameters()]
    if trained["announced"]:
        assert trained["announced"]["names"] == names
    assert list(trained["received"]) == names
    for name, weight in expected["received"].items():
        torch.testing.assert_close(trained["received"][name], weight, rtol=WITHIN, atol=1e-6)


@pytest.mark.launches
def test_servers_and_engines_get_the_weights_that_trl_gives_them(tmp_path, subtests):
    pool = RankPool(2)
    try:
        for name, case in CASES.items():
            with subtests.test(name):
                folder = str(tmp_path / name)
                expected = pool.run(train, folder, case, False)[0]
                trained = pool.run(train, folder, case, True)[0]
                preferences.compare(trained, expected, WITHIN)
                check_received(trained, expected, f"{folder}/model")
        with subtests.test("asynchronous"):
            folder = str(tmp_path / "asynchronous")
            case = recorded.Case(2, given=without_transfer)
            trained = pool.run(train, folder, case, True)[0]
            calls = ["/pause", "/start_weight_update", "/update_weights"]
            calls += ["/finish_weight_update", "/resume"]
            connected = ["/server_info", "/get_world_size", "/init_weight_transfer_engine"]
            assert trained["requests"] == connected + 3 * calls
            check_received(trained, {**trained, "received": trained["after"]}, f"{folder}/model")
    finally:
        pool.close()
