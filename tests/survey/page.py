"""docs/compatibility.md, made of the survey's outcomes: `python -m tests.survey.page` runs it and writes the page."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import transformers

from tests.ranks import RankPool
from tests.survey.outcomes import ACCEPTED, Outcome, Status, model_types, outcome

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
ERROR = re.compile(r"\d\.\de-\d\d")
TOP = """\
# Models

Every causal language model of transformers {version}, tiny (some 32 wide, a layer of each kind, random weights), on
two ranks with ping-pong: loss and all gradients beside those of one process that runs stock "eager" attention document
by document. Each trains in two ways: as the trainer does, which lays documents out anew, and in a custom loop
(`make_dispatcher`, `plan_batch`) with gradient checkpointing, where documents stay on the rank that has them.
`make survey` fails where one is wrong, hangs or ends in an error that does not say why; this page is written by
`python -m tests.survey.page`.

{equal} give the same in both, {whole} of them with documents whole on their rank, since they mix along the row
otherwise than by attention. {refused} are refused before the first step, on every rank, by the trainer and by
`make_dispatcher` alike. {unbuilt} cannot be made as a tiny causal language model from a config of their type.
"""
SECTIONS: dict[Status, tuple[str, str]] = {
    "equal": (
        "Equal",
        "Largest error of a gradient, or of the loss, by the largest value of its tensor, in float32; at most "
        "{most:.0e} is\naccepted. `layout` is the trainer's `document_layout` that `auto` chooses.\n\n"
        "| model | layout | trainer | loop |\n| --- | --- | --- | --- |",
    ),
    "refused": ("Refused", "| model | reason |\n| --- | --- |"),
    "not built": ("Not tried", "| model | why |\n| --- | --- |"),
}


def page(outcomes: Sequence[Outcome]) -> str:
    """The page of these outcomes, which are of all models."""
    by_status: dict[Status, list[Outcome]] = {status: [] for status in SECTIONS}
    for each in outcomes:
        by_status[each.status].append(each)
    parts = [
        TOP.format(
            version=transformers.__version__,
            equal=len(by_status["equal"]),
            whole=sum(each.layout == "whole" for each in by_status["equal"]),
            refused=len(by_status["refused"]),
            unbuilt=len(by_status["not built"]),
        )
    ]
    for status, (title, head) in SECTIONS.items():
        rows = "\n".join(map(_row, by_status[status]))
        parts.append(f"## {title}\n\n{head.format(most=ACCEPTED)}\n{rows}\n")
    return "\n".join(parts)


def without_errors(text: str) -> str:
    """The page without the sizes of errors, which differ from machine to machine."""
    return ERROR.sub("…", text)


def _row(each: Outcome) -> str:
    if each.status == "equal":
        errors = " | ".join(f"{error:.1e}" for error in each.errors)
        return f"| `{each.model_type}` | {each.layout} | {errors} |"
    return f"| `{each.model_type}` | {each.told.replace('|', '/').replace('<', '&lt;')} |"


def survey(types: Iterable[str]) -> list[Outcome]:
    """The outcomes of these types of models."""
    pool = RankPool(2)
    try:
        return [outcome(model_type, pool) for model_type in types]
    finally:
        pool.close()


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    PAGE.write_text(page(survey(model_types())))
