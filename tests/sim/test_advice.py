from dataclasses import fields, replace

import pytest

from hf_distca.sim.advice import advice
from hf_distca.sim.figures import WayFigures

NOTHING = {field.name: 0 for field in fields(WayFigures)}


def way(name: str, **figures) -> WayFigures:
    return WayFigures(**{**NOTHING, "name": name, "document_layout": None, **figures})


WHOLE = way("whole", step_seconds=2.0, attention_seconds=1.2)
JOINT = way(
    "joint", step_seconds=1.0, attention_seconds=0.4, attention_mean_seconds=0.3, document_layout="joint",
    exchange_seconds=0.05,
)  # fmt: skip


def test_what_pays_comes_with_settings_to_copy():
    assert advice([WHOLE, JOINT], WHOLE, JOINT, 512) == (
        "2.00× the speed of whole, the best other strategy. Set document_layout='joint', tokens_per_rank=512.",
    )


@pytest.mark.parametrize(("seconds", "pays"), [(1.01, False), (1.02, True), (0.5, False)])
def test_gains_that_runs_differ_by_are_none(seconds, pays):
    whole = way("whole", step_seconds=seconds, attention_seconds=1.0)
    (said,) = advice([whole, JOINT], whole, JOINT, 512)
    assert said.startswith(f"{seconds:.2f}× the speed") == pays
    if not pays:
        assert said == (
            f"No gain expected: {seconds:.2f}× the speed of whole, the best other strategy. "
            "Core attention is 30% of a step. Longer documents beside short ones would gain more."
        )


def test_long_waits_are_named():
    waits = replace(JOINT, exchange_seconds=0.06)
    assert advice([WHOLE, waits], WHOLE, waits, 512)[1:] == (
        "Ranks wait 6% of a step for exchanges. A larger tokens_per_rank hides more of them behind computation.",
        "A larger balance_tolerance moves fewer rows.",
    )


def test_ways_that_cut_documents_are_named():
    cuts = replace(WHOLE, documents_cut=0.1)
    faster = way("plain", step_seconds=0.9, documents_cut=0.3)
    assert advice([faster, cuts, JOINT], cuts, JOINT, 512)[1:] == (
        "Every other strategy cuts documents: whole cuts 10.0% of them. "
        "A document that is cut trains on less context.",
        "plain takes 0.900 s a step, but it cuts 30.0% of the documents. The comparison leaves it out, because a "
        "document that is cut trains on less context.",
    )
    slower = way("plain", step_seconds=2.1, documents_cut=0.3)
    assert len(advice([slower, cuts, JOINT], cuts, JOINT, 512)) == 2
