"""Rounds of figures, of one checkout or of two in turns, and their report.

A benchmark takes rounds. Each runs all that is compared, one after another, so that what disturbs
the machine for longer than a round disturbs all of it alike. Ratios are formed within a round; the
report has medians and quartiles. With `--against` the script of the same name in another checkout,
with the hf_distca of that checkout, takes a round whenever this one does; ratios between the two
checkouts are paired in the same way.
"""

import json
import os
import random
import re
import shlex
import subprocess
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from .figures import Spread, options_parser, print_json, spread, table
from .machine import CHECKOUT, commit
from .ranks import end_with_parent

Round = Mapping[str, float]
"""Figures of one round by name, the same names in every round."""

_MARK = "round: "
"""Begins the lines that one checkout's script sends to the other's."""


def rounds_parser(
    description: str | None, rounds: int, **numbers: tuple[int, str]
) -> ArgumentParser:
    parser = options_parser(description, rounds=(rounds, "how many"), **numbers)
    parser.add_argument(
        "--against",
        type=Path,
        metavar="CHECKOUT",
        help="another checkout, whose script of this name takes rounds in turns with this one",
    )
    parser.add_argument(
        "--follow", action="store_true", help=SUPPRESS
    )  # take a round at every line of stdin
    return parser


@dataclass(frozen=True)
class Measured:
    """The rounds of a benchmark.

    Attributes:
        ours: by round.
        theirs: of the other checkout, by round; empty without one.
        their_commit: the other checkout's.
    """

    ours: Sequence[Round]
    theirs: Sequence[Round] = ()
    their_commit: str | None = None


def take_rounds(options: Namespace, take: Callable[[], Round]) -> Measured:
    """Take as many rounds as the options ask for.

    Where another checkout's script asks for the rounds, this process sends them to it and exits.
    """
    if options.follow:
        _send({"checkout": str(CHECKOUT), "commit": commit()})
        for _ in sys.stdin:
            _send(take())
        raise SystemExit
    other = None if options.against is None else _Other(options.against)
    ours: list[Round] = []
    theirs: list[Round] = []
    sides = [(ours, take)] if other is None else [(ours, take), (theirs, other.take)]
    order = random.Random(0)
    for _ in range(options.rounds):
        for rounds, side in order.sample(sides, len(sides)):
            rounds.append(side())
            print(".", end="", flush=True, file=sys.stderr)
    print(file=sys.stderr)
    return Measured(ours, theirs, None if other is None else other.commit)


def slowest(of_ranks: Sequence[Round]) -> Round:
    """Each figure, of the rank that takes longest or needs most."""
    return {name: max(map(itemgetter(name), of_ranks)) for name in of_ranks[0]}


class _Other:
    """The same script of another checkout, in a process of its own.

    Raises:
        ValueError: hf_distca is not that of the two checkouts, or both are the same.
    """

    def __init__(self, checkout: Path) -> None:
        checkout = checkout.resolve()
        here = Path(__file__).resolve().parents[2]
        if here != CHECKOUT:
            raise ValueError(
                f"this benchmark lies in {here}, but imports hf_distca from {CHECKOUT}: set "
                "PYTHONPATH"
            )
        script = checkout / "benchmarks" / Path(sys.argv[0]).name
        words = shlex.split(re.sub(r"--against[= ]\S+", "", shlex.join(sys.argv[1:])))
        self._process = subprocess.Popen(
            [sys.executable, str(script), *words, "--follow"],
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": str(checkout)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=end_with_parent,
        )
        answer = self._heard()
        if Path(answer["checkout"]) != checkout or checkout == here:
            raise ValueError(
                f"--against {checkout} ran hf_distca from {answer['checkout']}; give another "
                "checkout's folder"
            )
        self.commit = answer["commit"]

    def take(self) -> Round:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._heard()

    def _heard(self) -> dict:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return json.loads(line.removeprefix(_MARK))
            print(line, end="", file=sys.stderr)
        raise RuntimeError(f"the other checkout's script ended with status {self._process.wait()}")


def _send(message: Mapping) -> None:
    print(_MARK + json.dumps(message), flush=True)


def over(numerator: str, denominator: str) -> Callable[[Round], float]:
    return lambda taken: taken[numerator] / taken[denominator]


def report(
    measured: Measured, derived: Mapping[str, Callable[[Round], float]], **others: object
) -> None:
    """Print tables of figures, of what is derived from them within a round and of checkouts, then
    one JSON object.

    Args:
        derived: by name, a ratio, or what else is computed of the figures of one round.
    """
    ours = measured.ours
    theirs = measured.theirs
    figures = _spreads(ours)
    _show(f"{len(ours)} rounds", figures)
    ratios = [_derived(figures_of_round, derived) for figures_of_round in ours]
    if derived:
        print()
        _show("within a round", _spreads(ratios))
    against = None
    if theirs:
        quotients = list(map(_quotients, ours, theirs))
        between = _spreads(quotients)
        figures_there = _spreads(theirs)
        print()
        table(
            [f"against {measured.their_commit}", "ours", "theirs", "ours / theirs (quartiles)"],
            [
                [
                    name,
                    f"{figures[name].median:.3f}",
                    f"{figures_there[name].median:.3f}",
                    str(quotient),
                ]
                for name, quotient in between.items()
            ],
        )
        against = {"commit": measured.their_commit, "ours_over_theirs": between, "rounds": theirs}
    print_json(figures=figures, derived=_spreads(ratios), rounds=ours, against=against, **others)


def _spreads(rounds: Sequence[Round]) -> dict[str, Spread]:
    return {name: spread(list(map(itemgetter(name), rounds))) for name in rounds[0]}


def _quotients(ours: Round, theirs: Round) -> Round:
    return {name: seconds / theirs[name] for name, seconds in ours.items()}


def _derived(figures: Round, derived: Mapping[str, Callable[[Round], float]]) -> Round:
    return {name: compute(figures) for name, compute in derived.items()}


def _show(title: str, figures: Mapping[str, Spread]) -> None:
    table([title, "median (quartiles)"], [[name, str(figure)] for name, figure in figures.items()])
