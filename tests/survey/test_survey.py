"""Causal language models of transformers are equal to one process, or refused with the reason.

`make test` runs one model for each mechanism, `make survey` all models.
"""

import pytest
import transformers

from tests.survey.outcomes import Outcome, model_types, outcome
from tests.survey.page import KINDS, PAGE, page, without_errors

MECHANISMS = {
    "grouped queries": ("llama", "joint"),
    "learned positions": ("gpt2", "joint"),
    "windows": ("mistral", "joint"),
    "windows in turn with full attention": ("gemma3_text", "joint"),
    "chunks": ("llama4_text", "joint"),
    "softcap": ("gemma2", "joint"),
    "sinks": ("gpt_oss", "joint"),
    "latent attention": ("deepseek_v3", "joint"),
    "experts": ("mixtral", "joint"),
    "keys and values of earlier layers": ("gemma4_text", "joint"),
    "text of a model with an image tower": ("gemma3", "joint"),
    "labels that reach the layers": ("gemma4", "joint"),
    "gated delta rule": ("qwen3_next", "joint"),
    "Mamba-2": ("bamba", "joint"),
    "Mamba-1": ("jamba", "whole"),
    "short convolution": ("lfm2", "joint"),
    "recurrence": ("recurrent_gemma", "whole"),
    "a head that passes the backbone by": ("opt", "joint"),
    "no attention": ("mamba2", "refused"),
    "attention of another model's states": ("whisper", "refused"),
    "a mask of its own": ("doge", "refused"),
    "keywords dropped": ("stablelm", "refused"),
}
"""By mechanism, a model and its layout, or that it is refused."""
UNBUILT = {
    "gemma3n",  # needs the package timm
    *(
        "gemma4_assistant",
        "gemma4_unified_assistant",
    ),  # drafts for another model, whose states they read
    *("musicgen", "musicgen_melody"),  # the class is of the decoder's config only
    "dots3_note",
}
"""Types that cannot be made tiny as causal language models; whatever else fails to be made is to be
looked at."""
LEAST_EQUAL, LEAST_WHOLE = 120, 4
MIXING = {
    "gated delta rule",
    "Mamba-2",
    "Mamba-1",
    "short convolution",
    "recurrence",
}
"""Mechanisms with which every document is computed alone."""


def sharing_on_page(model_type: str) -> dict[str, str]:
    """What becomes of equal beginnings, as the page says."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines()]
    (cells,) = [row for row in rows if row[0] == f"`{model_type}`"]
    return dict(zip(KINDS, cells[-2:], strict=True))


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_mechanism(rank_pools, mechanism):
    model_type, expected = MECHANISMS[mechanism]
    result = outcome(model_type, rank_pools[2])
    assert (result.layout or result.status) == expected, result
    assert result.status == ("refused" if expected == "refused" else "equal"), result
    if result.status == "equal":
        expected_sharing = "alone" if mechanism in MIXING else "shared"
        assert result.sharing["documents"] == expected_sharing
        assert sharing_on_page(model_type) == result.sharing


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return {}


@pytest.mark.survey
@pytest.mark.parametrize("model_type", model_types())
def test_equal_or_refused(rank_pools, outcomes, model_type):
    result = outcomes[model_type] = outcome(model_type, rank_pools[2])
    allowed = ("equal", "refused", "not built") if model_type in UNBUILT else ("equal", "refused")
    assert result.status in allowed, result
    if result.status != "equal":
        assert len(result.told) > 20, "says too little"


@pytest.mark.survey
def test_the_page_is_current(outcomes):
    if outcomes.keys() != set(model_types()):
        pytest.skip("only some models ran")
    equal = [result for result in outcomes.values() if result.status == "equal"]
    assert len(equal) >= LEAST_EQUAL
    assert sum(result.layout == "whole" for result in equal) >= LEAST_WHOLE
    # Else it is the page of another version.
    if f"transformers {transformers.__version__} was tested" in PAGE.read_text():
        assert without_errors(page(list(outcomes.values()))) == without_errors(PAGE.read_text())
