"""Every causal language model of transformers is equal to one process, or refused with the reason."""

import pytest
import transformers

from tests.survey.outcomes import Outcome, model_types, outcome
from tests.survey.page import PAGE, page, without_errors

pytestmark = pytest.mark.survey

UNBUILT = {
    "gemma3n",  # needs the package timm
    *("gemma4_assistant", "gemma4_unified_assistant"),  # drafts for another model, whose states they read
    *("musicgen", "musicgen_melody"),  # the class is of the decoder's config only
    "dots3_note",
}
"""Types that cannot be made tiny as causal language models; whatever else fails to be made is to be looked at."""
LEAST_EQUAL, LEAST_WHOLE = 120, 15


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return {}


@pytest.mark.parametrize("model_type", model_types())
def test_equal_or_refused(rank_pools, outcomes, model_type):
    found = outcomes[model_type] = outcome(model_type, rank_pools[2])
    allowed = ("equal", "refused", "not built") if model_type in UNBUILT else ("equal", "refused")
    assert found.status in allowed, found
    if found.status != "equal":
        assert len(found.told) > 20, "says too little"


def test_the_page_is_current(outcomes):
    if outcomes.keys() != set(model_types()):
        pytest.skip("only some models ran")
    equal = [each for each in outcomes.values() if each.status == "equal"]
    assert len(equal) >= LEAST_EQUAL
    assert sum(each.layout == "whole" for each in equal) >= LEAST_WHOLE
    if (
        f"transformers {transformers.__version__} was tested" in PAGE.read_text()
    ):  # else it is the page of another version
        assert without_errors(page(list(outcomes.values()))) == without_errors(PAGE.read_text())
