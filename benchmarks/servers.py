"""Time of a training step of one rank alone, and with one dedicated attention server on the other
core.

Forward and backward of a 2-layer LLaMA on 16384 tokens, one thread per process, float32. Its layers
have the proportions of Qwen3-0.6B at an eighth of the width: hidden size 128, 4 query heads and 2
key-value heads of 64, an MLP of 384. The tokens are one document, so that core attention is most of
the work, as in long-context training. A plan for one rank is not divided into nano-batches. With
--documents 8192 8192 the tokens are two documents and, by a plan made here, two nano-batches that
take turns: less attention, but the server works while the rank runs the other half's projections
and MLP. Two variants, interleaved in shuffled order in one run:

  alone   the rank computes everything itself, with the same kernel and no pool
  server  core attention is shared with the server, balanced by finishing time

The first steps, in which the rank learns speeds and its base load, do not count. Every round has
one step of each variant; figures are medians and quartiles over the rounds:

  speedup       a step alone over one with the server
  finish_ratio  when the rank is done over when the server is: the rank's own attention and what it
                does between the phases of an attention that the server has rows of, over the
                server's time in its kernel and, where nothing else is computed meanwhile (one
                document), the time in which rows travel. 1.0: both are done at once

Run: python benchmarks/servers.py [--rounds 6] [--documents 16384] [--transport tcp]
"""

import random
import sys
import time
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from harness import end_with_parent, options_parser, print_json, spread, table
from transformers import LlamaConfig, LlamaForCausalLM

from hf_distca import Dispatcher, PlanSettings
from hf_distca.kernels import get_kernel
from hf_distca.patches.layers import plan_layers
from hf_distca.plan import AttentionKind, MicroBatchPlan, NanoBatch
from hf_distca.planner.micro_batch import plan_placed
from hf_distca.pool.directory import Directory
from hf_distca.pool.rank.pool import Pool
from hf_distca.pool.rank.speeds import OBSERVED, observe
from hf_distca.pool.server import AttentionServer
from hf_distca.pool.token import make_token
from hf_distca.pool.transport import Choice, make_memory

CPU = torch.device("cpu")
LEARNING = 4
"""Steps with the server that are left out."""


def serve(port: int, token: bytes, transport: Choice) -> None:
    """The server's process; it ends with the training."""
    end_with_parent()
    torch.set_num_threads(1)
    server = AttentionServer(token, CPU, get_kernel("cpu", CPU), transport=transport)
    server.run("127.0.0.1", port, 60, lambda line: None)


def plan_of(lengths: list[int], settings: PlanSettings) -> MicroBatchPlan:
    """A plan whose nano-batches are the documents, one each."""
    plans = [plan_placed([[length]], settings) for length in lengths]
    nano_batches = [
        NanoBatch(np.array([number]), plan.nano_batches[0].layout, plan.nano_batches[0].plans)
        for number, plan in enumerate(plans)
    ]
    return MicroBatchPlan(tuple(nano_batches), plans[0].summary)


class Training:
    """Steps of a small model that this process computes alone, or together with a server."""

    def __init__(self, lengths: list[int], token: bytes, directory: Directory, transport: Choice):
        settings = settings_of(lengths)
        self._dispatchers = {variant: Dispatcher(settings, CPU) for variant in ("alone", "server")}
        self._plans = {
            "alone": plan_placed([lengths], settings),
            "server": plan_of(lengths, settings),
        }
        served = self._dispatchers["server"]
        memory = make_memory(transport, CPU, "127.0.0.1")
        self.pool = Pool(served, token, directory, memory)
        served.remote = self.pool
        self.pool.wait_for(1, 60)
        if len(self.pool.servers) != 1:
            raise RuntimeError("the server did not join")
        # Nothing else is computed while the rows of one document travel.
        self._counts_travel = len(lengths) == 1
        self._recorder = served.recorder
        self._recording = self._recorder.listen(*OBSERVED)
        torch.manual_seed(0)
        self._model = model_of(lengths)
        self._batch = batch_of(lengths)

    def step(self, variant: str) -> dict[str, float]:
        """Seconds of a step, of tasks that this process computed, and of those of the server."""
        self.pool.refresh()
        self._recording.take()
        kernel = self._recorder.seconds("kernel")
        begin = time.perf_counter()
        bound = self._dispatchers[variant].bind(self._plans[variant])
        self._model(**self._batch, distca_plan=bound).loss.backward()
        seconds = time.perf_counter() - begin
        self._model.zero_grad()
        observed = observe(self._recording.take())
        own = self._recorder.seconds("kernel") - kernel + observed.between_s
        served = 0.0
        for server in observed.servers.values():
            served += server.seconds
            if self._counts_travel:
                served += server.travel_s
        return {"seconds": seconds, "own": own, "served": served}


def model_of(lengths: list[int]) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=1024,
        max_position_embeddings=sum(lengths),
        attn_implementation="distca",
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    plan_layers(model)
    return model


def settings_of(lengths: list[int]) -> PlanSettings:
    kernel = get_kernel("cpu", CPU)
    return PlanSettings(
        ranks=1,
        rows_per_rank=sum(lengths),
        kinds=(AttentionKind(None, q_heads=4, kv_heads=2, dim_qk=64, dim_v=64),),
        bytes_per_value=4,
        row_overhead=kernel.row_overhead,
        gather_cost=kernel.gather_cost,
    )


def batch_of(lengths: list[int]) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 1024, (1, sum(lengths)))
    return {
        "input_ids": tokens,
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "labels": tokens,
        "shift_labels": tokens,
    }


def measure(lengths: list[int], rounds: int, transport: Choice) -> dict[str, Any]:
    token = make_token()
    directory = Directory("127.0.0.1", 0, token)
    process = get_context("spawn").Process(target=serve, args=(directory.port, token, transport))
    process.start()
    training = Training(lengths, token, directory, transport)
    training.step("alone")
    for _ in range(LEARNING):
        training.step("server")
    order = random.Random(0)
    steps: dict[str, list[dict[str, float]]] = {"alone": [], "server": []}
    for _ in range(rounds):
        for variant in order.sample(list(steps), 2):
            steps[variant].append(training.step(variant))
            print(".", end="", flush=True, file=sys.stderr)
    training.pool.close()
    process.join(10)
    process.kill()
    return steps


def main() -> None:
    parser = options_parser(__doc__, rounds=(6, "steps of each kind"))
    parser.add_argument(
        "--documents", type=int, nargs="+", default=[16384], help="1 or 2 lengths, in tokens"
    )
    parser.add_argument(
        "--transport", type=Choice, choices=(Choice.TCP, Choice.NIXL), default=Choice.TCP
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps = measure(options.documents, options.rounds, options.transport)
    pairs = list(zip(steps["alone"], steps["server"], strict=True))
    of_rounds = {
        "alone_s": spread([alone["seconds"] for alone, _ in pairs]),
        "server_s": spread([server["seconds"] for _, server in pairs]),
        "speedup": spread([alone["seconds"] / server["seconds"] for alone, server in pairs]),
        "finish_ratio": spread([server["own"] / server["served"] for _, server in pairs]),
    }
    table(["", "median (quartiles)"], [[name, str(figure)] for name, figure in of_rounds.items()])
    print_json(
        transport=options.transport,
        of_rounds=of_rounds,
        rounds=options.rounds,
        documents=options.documents,
    )


if __name__ == "__main__":
    main()
