"""The page of the survey: `python -m tests.survey.page` runs it and writes
docs/reference/compatibility.md.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import transformers

from tests.ranks import RankPool
from tests.survey.image_outcomes import image_outcome, takes_videos
from tests.survey.outcomes import (
    ACCEPTED,
    ACCEPTED_OF_SHARED,
    STRETCHED,
    WAYS,
    Outcome,
    Status,
    outcome,
)
from tests.survey.tiny import MULTIMODAL, OF_TEXT
from tests.survey.tiny_images import OF_IMAGES

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "compatibility.md"
NAMES = [*OF_TEXT, *sorted(MULTIMODAL)]
"""Names of all models."""
KINDS = ("padded", "documents")
"""Sequences that may have equal prefixes."""
ERROR = re.compile(r"\d\.\de-\d\d")
TOP = """\
# Model compatibility

Every causal language model of transformers {version} was tested on text as a tiny model (some 32
wide, one layer of each kind, random weights) on two ranks with ping-pong. Its loss and all
gradients are compared with one process that runs "eager" attention document by document. {types}
models are named by their type. {classes} further models take images or sound, too: they are named
by their class, and keep their towers. Each model trains in two ways:

- *trainer*: documents are laid out by the planner, as `DistCATrainer` does.
- *loop*: documents stay on their rank, with `make_dispatcher` and `plan_batch`, under gradient
  checkpointing.

Models whose rotary embeddings can depend on the length of a document train again with such
embeddings: as the trainer does with *longrope*, and in a loop with *dynamic* NTK. Each document is
rotated as it would be in a row of its own.

{equal} give the loss and gradients of one process in both. Of these, {whole} keep documents whole
on their rank ([hybrid models](../explanation/hybrid-models.md) says which, and why). {refused} are
refused before the first step, by an error on every rank. {untested} cannot be tested: they cannot
be built as a tiny causal language model from a config of their type, or take no text alone.

These models train again on sequences with
[equal prefixes](../guides/preferences.md#shared-prefixes). {padded} models share prefixes in padded
batches, and {documents} in documents.

Models that see images were tested on images, too: [Images and videos](#images-and-videos) lists
them.

`make survey` runs the test, and `python -m tests.survey.page` writes this page.
"""
SECTIONS: dict[Status, tuple[str, str]] = {
    "equal": (
        "Equal",
        (
            "The numbers are the largest error of the loss or of a gradient, relative to the "
            "largest value of its tensor,\nin float32. The test accepts at most {most:.0e}. "
            "`layout` is the `document_layout` that `auto` chooses.\n\n"
            "The last two columns say what becomes of equal prefixes in padded batches and in "
            "documents:\n\n"
            "- *shared*: equal prefixes are computed once. Loss and gradients are those without "
            "prefix sharing,\n  within {most_shared:.0e}.\n"
            "- *unshared*: no prefixes are shared, because that would change results. "
            "The log gives the reason.\n"
            "- *refused*: padded batches are refused, because the head does not read the "
            "backbone's output.\n\n"
            "| model | layout | trainer | loop | longrope | dynamic | padded | documents |\n"
            "| --- | --- | --- | --- | --- | --- | --- | --- |"
        ),
    ),
    "refused": ("Refused", "| model | reason |\n| --- | --- |"),
    "not tested": ("Not tested", "| model | why |\n| --- | --- |"),
}
IMAGES = """\
## Images and videos

Every model of `AutoModelForImageTextToText` was also tested on documents with images, on two ranks
with ping-pong. Documents are cut across ranks. One document has no image, and others have several
of different sizes, where the encoder takes different sizes. Loss and all gradients are compared
with one process that runs the stock model document by document. The test accepts at most
{most:.0e}. Models that take grids of videos were tested on videos, too.

{equal} models equal the stock model on images, and {videos} of them on videos. {refused} are
refused with the reason, and {untested} cannot be tested.

| model | images | videos |
| --- | --- | --- |
"""
IMAGES_REFUSED = """\

| model | images are refused, or not tested |
| --- | --- |
"""


def page(outcomes: Sequence[Outcome]) -> str:
    """The page of these outcomes, which are of all models."""
    counts = Counter(outcome.status for outcome in outcomes)
    whole = sum(outcome.status == "equal" and outcome.layout == "whole" for outcome in outcomes)
    counted = {
        "equal": counts["equal"],
        "refused": counts["refused"],
        "untested": counts["not tested"],
        "types": len(OF_TEXT),
        "classes": len(MULTIMODAL),
        "whole": whole,
        **{
            name: sum(outcome.sharing.get(name) == "shared" for outcome in outcomes)
            for name in KINDS
        },
    }
    parts = [TOP.format(version=transformers.__version__, **counted)]
    for status, (title, head) in SECTIONS.items():
        rows = "\n".join(_row(outcome) for outcome in outcomes if outcome.status == status)
        limits = {"most": ACCEPTED, "most_shared": ACCEPTED_OF_SHARED}
        parts.append(f"## {title}\n\n{head.format(**limits)}\n{rows}\n")
    return "\n".join(parts)


def images_part(images: Sequence[Outcome], videos: Mapping[str, Outcome]) -> str:
    """The part of the page on images.

    Args:
        videos: outcomes of models that take videos, by name.
    """
    counts = Counter(outcome.status for outcome in images)
    top = IMAGES.format(
        most=ACCEPTED,
        equal=counts["equal"],
        videos=sum(outcome.status == "equal" for outcome in videos.values()),
        refused=counts["refused"],
        untested=counts["not tested"],
    )
    by_name = sorted(images, key=lambda outcome: outcome.name.lower())
    equal = [outcome for outcome in by_name if outcome.status == "equal"]
    rows = [
        f"| `{outcome.name}` | {outcome.errors['image']:.1e} | {_of_video(videos, outcome.name)} |"
        for outcome in equal
    ]
    others = [_row(outcome) for outcome in by_name if outcome.status != "equal"]
    return top + "\n".join(rows) + "\n" + IMAGES_REFUSED + "\n".join(others) + "\n"


def _of_video(videos: Mapping[str, Outcome], name: str) -> str:
    outcome = videos.get(name)
    return f"{outcome.errors['video']:.1e}" if outcome and outcome.errors else "–"


def without_errors(text: str) -> str:
    """The page without the sizes of errors, which differ from machine to machine."""
    return ERROR.sub("…", text)


def _row(outcome: Outcome) -> str:
    if outcome.status == "equal":
        named = (outcome.errors.get(name) for name in (*WAYS, *STRETCHED))
        errors = " | ".join("–" if error is None else f"{error:.1e}" for error in named)
        sharing = " | ".join(outcome.sharing[name] for name in KINDS)
        return f"| `{outcome.name}` | {outcome.layout} | {errors} | {sharing} |"
    return f"| `{outcome.name}` | {outcome.told.replace('|', '/').replace('<', '&lt;')} |"


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    with closing(RankPool(2)) as pool:
        text = page([outcome(name, pool) for name in NAMES])
        images = [image_outcome(name, pool) for name in OF_IMAGES]
        videos = {
            name: image_outcome(name, pool, "video") for name in OF_IMAGES if takes_videos(name)
        }
        PAGE.write_text(f"{text}\n{images_part(images, videos)}")
