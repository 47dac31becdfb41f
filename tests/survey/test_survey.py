"""Causal language models of transformers, also those with towers, are equal to one process, or
refused with the reason.

`make test` runs one model for each mechanism, `make survey` all models.
"""

import pytest
import transformers

from tests.survey.outcomes import Outcome, outcome
from tests.survey.page import KINDS, NAMES, PAGE, page, without_errors

MECHANISMS = {
    "grouped queries": ("llama", "auto"),
    "learned positions": ("gpt2", "auto"),
    "windows": ("mistral", "auto"),
    "windows in turn with full attention": ("gemma3_text", "auto"),
    "chunks": ("llama4_text", "auto"),
    "softcap": ("gemma2", "auto"),
    "sinks": ("gpt_oss", "auto"),
    "latent attention": ("deepseek_v3", "auto"),
    "experts": ("mixtral", "auto"),
    "keys and values of earlier layers": ("gemma4_text", "auto"),
    "text of a model with an image tower": ("gemma3", "auto"),
    "labels that reach the layers": ("gemma4", "auto"),
    "a tower for images, and the class says that its loss takes no number of targets": (
        *("Qwen3VLForConditionalGeneration", "auto"),
    ),
    "positions in time, height and width that reach the layers": (
        *("Ernie4_5_VLMoeForConditionalGeneration", "auto"),
    ),
    "a decoder with a head of its own": ("Llama4ForConditionalGeneration", "auto"),
    "a tower that mixes rows": ("FunAsrNanoForConditionalGeneration", "auto"),
    "attention by a list of its own in a tower": (
        *("DeepseekVLHybridForConditionalGeneration", "auto"),
    ),
    "gated delta rule": ("qwen3_next", "auto"),
    "Mamba-2": ("bamba", "auto"),
    "Mamba-1": ("jamba", "whole"),
    "short convolution": ("lfm2", "auto"),
    "recurrence": ("recurrent_gemma", "whole"),
    "a head that passes the backbone by": ("opt", "auto"),
    "no attention": ("mamba2", "refused"),
    "attention of another model's states": ("whisper", "refused"),
    "a mask of its own": ("doge", "refused"),
    "keywords dropped": ("stablelm", "refused"),
}
"""By mechanism, a model and its layout, or that it is refused."""
UNTESTED = {
    *("Blip2ForConditionalGeneration", "IdeficsForVisionText2Text"),  # take no text without images
    *("InstructBlipForConditionalGeneration", "InstructBlipVideoForConditionalGeneration"),
    "VoxtralRealtimeForConditionalGeneration",  # takes no text without sound
    "KyutaiSpeechToTextForConditionalGeneration",  # takes no text, but codes of sound
    "Molmo2ForConditionalGeneration",  # wants to be told that no token is an image's
    "DiffusionGemmaForBlockDiffusion",  # a diffusion model
    "EvollaForProteinText2Text",  # no auto class loads it
    *(
        "gemma4_assistant",
        "gemma4_unified_assistant",
    ),  # drafts for another model, whose states they read
    # Its tokens of images and sound end where its config says, which no tiny vocabulary reaches.
    "Apertus1p5ForConditionalGeneration",
    *("musicgen", "musicgen_melody"),  # the class is of the decoder's config only
}
"""Models that cannot be made tiny, or that transformers itself cannot train on text; whatever else
fails is to be looked at."""
LEAST_EQUAL, LEAST_WHOLE = 185, 4
WHOLE = {"Mamba-1", "recurrence"}
"""Mechanisms of models that share no prefixes, because their documents stay whole."""


def sharing_on_page(name: str) -> dict[str, str]:
    """What becomes of equal prefixes, as the page says."""
    text = PAGE.read_text().partition("## Images")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines()]
    (cells,) = [row for row in rows if row[0] == f"`{name}`"]
    return dict(zip(KINDS, cells[-2:], strict=True))


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_mechanism(rank_pools, mechanism):
    name, expected = MECHANISMS[mechanism]
    result = outcome(name, rank_pools[2])
    assert (result.layout or result.status) == expected, result
    assert result.status == ("refused" if expected == "refused" else "equal"), result
    if result.status == "equal":
        expected_sharing = "unshared" if mechanism in WHOLE else "shared"
        assert result.sharing["documents"] == expected_sharing
        assert sharing_on_page(name) == result.sharing


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return {}


@pytest.mark.survey
@pytest.mark.parametrize("name", NAMES)
def test_equal_or_refused(rank_pools, outcomes, name):
    result = outcomes[name] = outcome(name, rank_pools[2])
    allowed = ("equal", "refused", "not tested") if name in UNTESTED else ("equal", "refused")
    assert result.status in allowed, result
    if result.status != "equal":
        assert len(result.told) > 20, "says too little"


@pytest.mark.survey
def test_the_page_is_current(outcomes):
    if outcomes.keys() != set(NAMES):
        pytest.skip("only some models ran")
    equal = [result for result in outcomes.values() if result.status == "equal"]
    assert len(equal) >= LEAST_EQUAL
    assert sum(result.layout == "whole" for result in equal) >= LEAST_WHOLE
    # Else it is the page of another version.
    if f"transformers {transformers.__version__} was tested" in PAGE.read_text():
        text = without_errors(page(list(outcomes.values())))
        assert without_errors(PAGE.read_text()).startswith(text)
