"""Models with towers, given by the folder of a checkpoint: losses on chats are those of TRL."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hf_distca import DistCAConfig, describe_run
from hf_distca.checks.refusal import RefusedError
from tests.ranks import RankPool
from tests.survey.tiny import MULTIMODAL, OF_TEXT, tiny_model
from tests.trainer.comparison import Run, assert_equal, train_alone, train_planned
from tests.trainer.features import on_chats


def says_no(name: str) -> bool:
    """Whether the class of a model says that its loss takes no number of targets."""
    return not getattr(getattr(transformers, name), "accepts_loss_kwargs", True)


NAMES = [name for name in MULTIMODAL if says_no(name)]
NAMES += [name for name in ("gemma4", "gemma4_unified") if name in OF_TEXT]
NAMES.remove("Molmo2ForConditionalGeneration")  # wants to be told that no token is an image's
COMMON = "Qwen3_5ForConditionalGeneration"
"""The model of `make test`."""


def of_folder(name: str, folder: str) -> Run:
    """A training on chats, of whose model both trainers get the folder."""
    within = (2e-6, 1e-4)  # recurrences are computed in chunks of other lengths
    # The loss of experts is a mean over a rank's rows.
    return on_chats(
        {"router_aux_loss_coef": 0.0},
        model=lambda how: tiny_model(name, how),
        given={"model": folder},
        within=within,
    )


def planned(folder: str, name: str) -> Any:
    return train_planned(folder, of_folder(name, f"{folder}/checkpoint"), "ddp", name)


@pytest.mark.parametrize(
    "name", [COMMON, *(pytest.param(name, marks=pytest.mark.survey) for name in NAMES)]
)
def test_losses_are_those_of_trl(
    rank_pools: dict[int, RankPool], name: str, tmp_path: Path
) -> None:
    model = tiny_model(name, "eager")
    try:
        settings = DistCAConfig(tokens_per_rank=64)
        describe_run(tiny_model(name, "distca"), settings, ranks=2, device=torch.device("cpu"))
    except RefusedError as refusal:
        pytest.skip(str(refusal))
    model.save_pretrained(tmp_path / "checkpoint")
    expected = train_alone(str(tmp_path), of_folder(name, str(tmp_path / "checkpoint")))
    for result in rank_pools[2].run(planned, str(tmp_path), name):
        assert_equal(of_folder(name, ""), result, lambda exact=False: expected, "ddp")
