"""A stand-in for vLLM: a server that speaks its protocol over HTTP, and an engine in the process.

TRL's clients speak to the server. NCCL carries weights in vLLM; here they are kept in the process.
Completions follow from the prompt alone.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from torch import Tensor
from trl.experimental.async_grpo import weight_transfer
from trl.generation import vllm_client, vllm_generation

LOG_PROB = -4.0


def completion(prompt: list[int], number: int) -> list[int]:
    """Tokens that stand in for a sampled completion."""
    digest = blake2b(bytes(token % 256 for token in [*prompt, number]), digest_size=24).digest()
    return [5 + byte % 59 for byte in digest[: 4 + digest[0] % 20]]


class StandIn:
    """What the server has been asked for, and the weights that it has been given."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.announced: dict[str, Any] = {}
        self.weights: dict[str, Tensor] = {}
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(None)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self._answer(json.loads(body) if body else {})

            def _answer(self, asked: dict[str, Any] | None) -> None:
                answer = json.dumps(stand_in.answer(self.path.partition("?")[0], asked)).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, path: str, asked: dict[str, Any] | None) -> dict[str, Any]:
        if path not in ("/health", "/v1/models"):
            self.requests.append(path)
        if path == "/v1/models":
            return {"data": [{"id": "model", "max_model_len": 4096}]}
        if path == "/get_world_size":
            return {"world_size": 1}
        if path == "/server_info":
            model = {"dtype": "torch.float32", "logprobs_mode": "processed_logprobs"}
            info = {"model_config": model, "weight_transfer_config": {"backend": "nccl"}}
            return {"vllm_config": info}
        if path == "/update_weights" and asked is not None:
            self.announced = asked["update_info"]
        if path == "/v1/completions" and asked is not None:
            return {"choices": [choice(prompt, n) for prompt in asked["prompt"] for n in range(2)]}
        return {"success": True}

    def receive(self, iterator: Iterator[tuple[str, Tensor]], **_: Any) -> None:
        """Take the place of NCCL's broadcast."""
        self.weights = {name: weight.detach().clone() for name, weight in iterator}


def choice(prompt: list[int], number: int) -> dict[str, Any]:
    tokens = completion(prompt, number)
    names = [f"token_id:{token}" for token in tokens]
    log_probs = [LOG_PROB] * len(tokens)
    logged = {"tokens": names, "token_logprobs": log_probs, "top_logprobs": [{}] * len(tokens)}
    return {"prompt_token_ids": prompt, "token_ids": tokens, "logprobs": logged}


class Engine:
    """An engine beside the training, as `vllm.LLM`."""

    def __init__(self, **_: Any) -> None:
        self.weights: dict[str, Tensor] = {}
        inner = SimpleNamespace(load_weights=self._load)
        runner = SimpleNamespace(model_runner=SimpleNamespace(model=inner))
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=runner),
            model_config=SimpleNamespace(max_model_len=4096),
        )
        self.calls: list[str] = []

    def _load(self, weights: list[tuple[str, Tensor]]) -> None:
        self.weights |= {name: weight.detach().clone() for name, weight in weights}

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self.calls.append(name)

    def generate(self, prompts: list[dict[str, list[int]]], **_: Any) -> list[Any]:
        outputs = []
        for number, prompt in enumerate(prompts):
            ids = prompt["prompt_token_ids"]
            tokens = completion(ids, number)
            log_probs = [{token: SimpleNamespace(logprob=LOG_PROB, rank=1)} for token in tokens]
            made = SimpleNamespace(token_ids=tokens, logprobs=log_probs)
            outputs.append(SimpleNamespace(prompt_token_ids=ids, outputs=[made]))
        return outputs


@contextmanager
def without_vllm(stand_in: StandIn) -> Iterator[list[Engine]]:
    """Let TRL use the stand-ins where vLLM and NCCL would be. Yield the engines that it makes."""
    engines: list[Engine] = []

    def make(**options: Any) -> Engine:
        engines.append(Engine(**options))
        return engines[-1]

    group = SimpleNamespace(group=SimpleNamespace(store=None, socket=None))
    transfer = SimpleNamespace(
        trainer_init=lambda *_: group,
        trainer_send_weights=lambda iterator, **_: stand_in.receive(iterator),
    )

    def connect(client: Any, device: Any) -> None:
        # As TRL's, which needs a GPU for NCCL.
        assert client.get_server_info()["weight_transfer_config"] is not None
        client._post(f"{client.base_url}/init_weight_transfer_engine", json={"init_info": {}})
        client.communicator = group

    thread = threading.Thread(target=stand_in.server.serve_forever, daemon=True)
    thread.start()
    with ExitStack() as contexts:
        for module in (vllm_client, vllm_generation, weight_transfer):
            contexts.enter_context(patch.object(module, "is_vllm_available", lambda **_: True))
        for module in (vllm_client, weight_transfer):
            for name, value in (
                ("NCCLWeightTransferEngine", transfer),
                ("NCCLTrainerSendWeightsArgs", SimpleNamespace),
                ("get_ip", lambda: "127.0.0.1"),
                ("get_open_port", lambda: 1),
            ):
                contexts.enter_context(patch.object(module, name, value, create=True))
        contexts.enter_context(patch.object(vllm_client.VLLMClient, "init_communicator", connect))
        contexts.enter_context(patch.object(vllm_generation, "LLM", make, create=True))
        contexts.enter_context(
            patch.object(vllm_generation, "SamplingParams", SimpleNamespace, create=True)
        )
        yield engines
    stand_in.server.shutdown()
    stand_in.server.server_close()
