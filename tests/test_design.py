"""The design page lists the files of a training step: a traced step goes through these files and no
others.
"""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

import hf_distca
from hf_distca.checks.setting_names import CHECKPOINTING
from hf_distca.plan.schedule import make_schedule
from tests.ranks import RankPool
from tests.trainer.small_trainers import LENGTHS, make_trainer

ROOT = Path(hf_distca.__file__).parent
DESIGN = (ROOT.parent / "docs" / "development" / "design.md").read_text()
LISTED = re.findall(r"^\| \d+ \| `([\w/]+\.py)`", DESIGN, re.MULTILINE)
"""The files of the numbered rows, in order."""
PATH = re.findall(
    r"^\| \d+ \| `([\w/]+)\.py`",
    DESIGN.partition("From `trainer.train()` to the kernel and back")[2].partition("Four files")[0],
    re.MULTILINE,
)
"""The files through which a step goes to the kernel and back, without suffixes."""
INSIDES = ("planner/", "plan/", "predict/", "kernels/")
"""Described by the files that use them: the planner, its data, its predictions, and kernels."""


class Traced(TrainerCallback):
    """Notes the files of hf_distca that run from the end of the second step to the gradients of the
    third.
    """

    def __init__(self) -> None:
        self.files: set[str] = set()

    def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        make_schedule.cache_clear()
        if state.global_step == 2:
            sys.setprofile(self.profile)

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        sys.setprofile(None)

    def profile(self, frame: Any, event: str, _arg: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(ROOT)):
            self.files.add(path[len(str(ROOT)) + 1 :])


def _files_of_a_step(folder: str) -> set[str]:
    settings = {"max_steps": 3, "logging_steps": 100, "save_strategy": "no", CHECKPOINTING: True}
    trainer = make_trainer(folder, lengths=LENGTHS * 8, **settings)
    traced = Traced()
    trainer.add_callback(traced)
    trainer.train()
    return traced.files


@pytest.mark.launches
def test_a_step_goes_through_the_listed_files(tmp_path):
    pool = RankPool(2)  # of its own: a trainer leaves its state in its process
    try:
        files = pool.run(_files_of_a_step, str(tmp_path))[0]
    finally:
        pool.close()
    assert {name for name in files if not name.startswith(INSIDES)} == set(LISTED)
    assert len(LISTED) == len(set(LISTED)) <= 22


def test_the_path_of_a_step_is_short_and_the_same_in_the_map_for_agents():
    (line,) = re.findall(r"^A step, .*$", (ROOT.parent / "AGENTS.md").read_text(), re.MULTILINE)
    assert re.findall(r"`([\w/]+)`", line) == PATH
    assert len(PATH) <= 15


def test_named_files_exist():
    named = set(re.findall(r"`((?:[\w]+/)+[\w]*(?:\.py)?)`", DESIGN))
    assert {"planner/division.py", "plan/schedule.py"} <= named
    assert not {
        name for name in named if not ((ROOT / name).exists() or (ROOT.parent / name).exists())
    }


def test_phases_are_those_of_the_schedule():
    shown = re.findall(r"^ (forward|backward)    ?(send .*)$", DESIGN, re.MULTILINE)
    for (direction, text), turn in zip(shown, ("first", "second"), strict=True):
        assert _written(direction, turn, 1) == re.sub(r"\s+", " ", text)
    (staged,) = re.findall(r"^ staged +(.*) │ …$", DESIGN, re.MULTILINE)
    assert f"local │ {staged} │" in _written("forward", "first", 4)


def _written(direction: Any, turn: Any, stages: int) -> str:
    """A schedule as the page writes it: what arrived is only named where it was not just sent."""
    tasks = ("remote-KV", "remote-query", *(("remote-query prefix",) if stages > 1 else ()))
    keys = frozenset([("local", 0), *((name, stage) for name in tasks for stage in range(stages))])
    parts: list[str] = []
    for phase in make_schedule(direction, turn, calls=keys, windowed=False, stages=stages):
        name = phase.name.replace("run ", "").replace("; ", " · ")
        parts.append(
            name if not name.startswith("wait do") else re.sub("^wait [^·]*", "wait … ", name)
        )
        parts += ["pause"] if phase.pause else []
    return " │ ".join(parts)
