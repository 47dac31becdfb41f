"""Every loss of TRL's DPO and GRPO trainers, with padded batches computed packed, beside TRL's own
training.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankPool
from tests.trainer.preferences import Case, compare_with_stock

LOSSES = {
    "dpo": [
        *(
            "sigmoid",
            "sigmoid_norm",
            "hinge",
            "ipo",
            "exo_pair",
            "nca_pair",
            "robust",
            "bco_pair",
            "sppo_hard",
        ),
        *("aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft"),
    ],
    "grpo": ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "exo_pair": {"label_smoothing": 1e-3},
    "luspo": {"importance_sampling_level": "sequence"},
}
"""Arguments that a loss needs."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.mark.survey
@pytest.mark.parametrize(
    ("kind", "loss"), [(kind, loss) for kind, losses in LOSSES.items() for loss in losses]
)
@pytest.mark.launches
def test_losses_are_those_of_trl(ranks: RankPool, kind: str, loss: str, tmp_path: Path) -> None:
    arguments = {"loss_type": loss, "max_steps": 4, **OPTIONS.get(loss, {})}
    ranks.run(compare_with_stock, str(tmp_path), Case(kind, arguments=arguments), 1e-4)
