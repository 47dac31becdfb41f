"""Steps on two CPU ranks, measured and predicted: plain DDP and planned, for ten mixes of document
lengths.

Forward, backward and AdamW of a 2-layer LLaMA of hidden size 256 under DistributedDataParallel,
float32, one thread a rank. Three times in every round each rank measures its kernel while the other
one does, the link between them, and two plain steps on documents of 128 tokens, short and long
rows: what a token takes besides core attention, and what a step takes besides tokens. Each mix is
predicted from the means of these costs alone, never from its own steps, by hf_distca.sim: plain,
whole documents balanced by their pairs, and planned as training does by default: the costs of the
round before choose the plans. Freed memory stays with its process, as in step_time.py.

Run: python benchmarks/predicted_steps.py [--rounds 8] [--tokens 8192]
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from harness import Ranks, Round, keep_freed_memory, rounds_parser, spread, table, take_rounds
from harness.figures import print_json
from harness.models import settings_of
from harness.simulated import simulated_run
from step_time import CPU, MIXES, SIZES, Models, whole_rows

from hf_distca import Dispatcher
from hf_distca.dispatch.peers import PeerExchanges
from hf_distca.dispatch.process_groups import Groups
from hf_distca.kernels import get_kernel
from hf_distca.patches.layers import plan_layers
from hf_distca.plan import AttentionKind, MicroBatchPlan
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.predict.device_profile import DeviceProfile
from hf_distca.predict.seconds import KernelCost, LinkCost, Links
from hf_distca.predict.shapes import ModelShape
from hf_distca.predict.walk import predict_plan
from hf_distca.profiling.device import measured_kernel
from hf_distca.profiling.links import measured_link
from hf_distca.run import RunSpec
from hf_distca.sim.strategies import on_ranks

RANKS = 2
KIND = AttentionKind(None, 4, 4, 64, 64)
SHORT = 128
MORE_MIXES = {
    "two long": [6144, 4096, *[512] * 12],
    "one very long": [12288, *[256] * 16],
    "bimodal": [*[3072] * 4, *[128] * 32],
    "medium": [3072, 2560, 2048, 1536, 1280, 1024, 1024, 768, 768, 512, 512, 512, 384, 384],
}
"""Tokens of documents of two ranks, as in step_time.py."""
LENGTHS = {**MIXES, **MORE_MIXES}
PER_RANK = 8192


@dataclass(frozen=True)
class Calibration:
    """Costs measured in a round, in seconds.

    Attributes:
        token: of a token, without core attention.
        step: of a step, without its tokens.
    """

    forward: KernelCost
    backward: KernelCost
    link: LinkCost
    token: float
    step: float

    def run(self, tokens: int) -> RunSpec:
        layers = SIZES["num_hidden_layers"]
        hidden = SIZES["hidden_size"]
        mlp = SIZES["intermediate_size"]
        model = ModelShape.llama(layers, hidden, mlp, 4, 4, 1024, 64)
        flops = 6.0 * (
            layers * (model.before_attention + model.after_attention) + model.head
        )  # forward and backward of a token
        links = Links(self.link, self.link)
        profile = DeviceProfile(
            "this CPU", "measured in the same round", "float32", KIND, self.forward, self.backward,
            flops / self.token, np.inf, flops / self.token, links, links,
        )  # fmt: skip
        return simulated_run(model, RANKS, tokens, profile=profile, checkpointing=None)


class Steps:
    """The steps of a rank by name, and their predictions."""

    def __init__(self, tokens: int) -> None:
        self.kernel = get_kernel("auto", CPU)
        self.groups = Groups(CPU, 60.0)
        self.tokens = tokens
        self._models = Models(RANKS * tokens)
        plan_layers(self._models.distca)
        self.settings = settings_of(self._models.distca, RANKS, tokens, CPU)
        self._dispatcher = Dispatcher(self.settings, CPU)
        self.steps: dict[str, Callable[[], None]] = {}
        self.plans: dict[str, MicroBatchPlan] = {}
        few, many = (
            self._models.plain([[SHORT] * (rows // SHORT)] * RANKS)
            for rows in (tokens // 4, tokens)
        )
        self._short = {tokens // 4: few, tokens: many}
        for mix in LENGTHS:
            self.steps[f"{mix}, plain"] = self._models.plain(whole_rows(self.lengths(mix), RANKS))
        self._plan()

    def choose_by(self, calibration: Calibration) -> None:
        """Choose the plans of the steps from now on by these costs, as training does."""
        costs = calibration.run(self.tokens).costs
        self.settings = replace(self.settings, costs=costs)
        self._plan()

    def _plan(self) -> None:
        for mix in LENGTHS:
            plan = self.plans[mix] = plan_micro_batch(self.lengths(mix), self.settings)
            self.steps[f"{mix}, planned"] = self._models.planned(
                plan, self.lengths(mix), self._dispatcher
            )

    def lengths(self, mix: str) -> list[int]:
        return [length * self.tokens // PER_RANK for length in LENGTHS[mix]]

    def measured(self) -> tuple[KernelCost, KernelCost, LinkCost, list[float]]:
        """Measure the kernel's forward and backward, the link, and the seconds of the steps on
        short documents.
        """
        dist.barrier()
        forward, backward, _ = measured_kernel(self.kernel, KIND, torch.float32, CPU)
        link = measured_link(PeerExchanges(self.groups, CPU), [1, 0])
        return forward, backward, link, [seconds_of(step) for step in self._short.values()]

    def calibrated(
        self, measured: Sequence[tuple[KernelCost, KernelCost, LinkCost, list[float]]]
    ) -> Calibration:
        """Return the mean costs of all ranks and measurements: what kernel and link do not take is
        left for tokens.
        """
        every = [each for of_rank in self.groups.all_gather(list(measured)) for each in of_rank]
        forward, backward, link, short = zip(*every, strict=True)
        free = Calibration(
            KernelCost(*np.mean([astuple(each) for each in forward], axis=0).tolist()),
            KernelCost(*np.mean([astuple(each) for each in backward], axis=0).tolist()),
            LinkCost(*np.mean([astuple(each) for each in link], axis=0).tolist()),
            token=1e-30,
            step=0.0,
        )
        others = [
            seconds
            - on_ranks([[SHORT] * (tokens // SHORT)] * RANKS, free.run(self.tokens)).attention.max()
            for tokens, seconds in zip(self._short, np.mean(short, axis=0).tolist(), strict=True)
        ]
        few, many = self._short
        token = (others[1] - others[0]) / (many - few)
        return replace(free, token=token, step=others[0] - token * few)

    def predict(self, mix: str, calibration: Calibration) -> dict[str, float]:
        lengths = self.lengths(mix)
        run = calibration.run(self.tokens)
        plain = on_ranks(whole_rows(lengths, RANKS), run)
        balanced = predict_plan(
            self.plans[mix], run.costs, self.settings.node_of_ranks, self.settings.bytes_per_value
        )
        return {
            "plain": plain.seconds + calibration.step,
            "planned": balanced.seconds + calibration.step,
        }


def seconds_of(step: Callable[[], None]) -> float:
    """Return the median seconds of three steps."""
    times = []
    for _ in range(3):
        dist.barrier()
        begin = time.perf_counter()
        step()
        dist.barrier()
        times.append(time.perf_counter() - begin)
    return sorted(times)[1]


def prepare(tokens: int) -> Callable[[], Round]:
    """Make the models on this rank, and a round: every step once, in shuffled order, then all
    predictions.
    """
    keep_freed_memory()
    made = Steps(tokens)
    order = random.Random(0)

    def take() -> Round:
        seconds: dict[str, float] = {}
        names = order.sample(list(made.steps), len(made.steps))
        measured = [made.measured()]
        for half in (names[::2], names[1::2]):
            seconds |= {name: seconds_of(made.steps[name]) for name in half}
            measured.append(made.measured())
        calibration = made.calibrated(measured)
        figures = {"token, µs": calibration.token * 1e6, "step, ms": calibration.step * 1e3}
        for mix in LENGTHS:
            for strategy, guess in made.predict(mix, calibration).items():
                figures[f"{mix}, {strategy}, measured"] = seconds[f"{mix}, {strategy}"]
                figures[f"{mix}, {strategy}, predicted"] = guess
        made.choose_by(calibration)
        return figures

    take()  # warms up
    return take


def main() -> None:
    options = rounds_parser(__doc__, rounds=8, tokens=(PER_RANK, "of a rank")).parse_args()
    with Ranks(RANKS, prepare, options.tokens) as ranks:
        rounds = take_rounds(options, lambda: ranks.take()[0]).ours
    found = {}
    for mix in LENGTHS:
        for strategy in ("plain", "planned"):
            seconds = f"{mix}, {strategy}, measured"
            guess = f"{mix}, {strategy}, predicted"
            found[f"{mix}, {strategy}"] = {
                "seconds": spread([each[seconds] for each in rounds]),
                "predicted / measured": spread([each[guess] / each[seconds] for each in rounds]),
            }
    rows = []
    for name, figures in found.items():
        rows.append((name, *(f"{figure} {value}" for figure, value in figures.items())))
    table(("", "", ""), rows)
    worst = max(abs(each["predicted / measured"].median - 1) for each in found.values())
    print_json(rounds=len(rounds), worst_median_error=worst, steps=found)


if __name__ == "__main__":
    main()
