"""Models of transformers that see images equal the stock model on documents with images, or are
refused with the reason.

`make test` runs one model for each kind of inputs, `make survey` all models.
"""

import pytest
import transformers

from tests.survey.image_outcomes import image_outcome, takes_videos
from tests.survey.outcomes import Outcome
from tests.survey.page import PAGE, images_part, without_errors
from tests.survey.tiny_images import OF_IMAGES

KINDS = {
    "tiles": "LlavaNextForConditionalGeneration",
    "tiles of documents with one image": "LlavaOnevisionForConditionalGeneration",
    "features by layer alone": "Granite4VisionForConditionalGeneration",
    "images of a row of the batch, and masks": "Idefics2ForConditionalGeneration",
    "images and masks": "AriaForConditionalGeneration",
    "two resolutions": "DeepseekVLHybridForConditionalGeneration",
    "padded patches": "Lfm2VlForConditionalGeneration",
    "patches side by side, and positions by their sizes": ("MiniCPMV4_7ForConditionalGeneration"),
    "grids, and rows besides": "HunYuanVLForConditionalGeneration",
    "grids, each with its merge": "VideoLlama3ForConditionalGeneration",
    "grids of rows and columns": "NemotronH_Omni_Reasoning_V3",
    "square patches": "PaddleOCRVLForConditionalGeneration",
    "the last hidden state": "Llama4ForConditionalGeneration",
    "positions by tokens alone": "Qwen2_5OmniThinkerForConditionalGeneration",
    "features of three dimensions": "VideoLlavaForConditionalGeneration",
}
"""By what the encoder takes or returns, a model."""
VIDEOS = {
    "in one piece": "Qwen2_5_VLForConditionalGeneration",
    "by frame": "Qwen3VLForConditionalGeneration",
}
REFUSED = {
    "Gemma3ForConditionalGeneration": "later ones",
    "PaliGemmaForConditionalGeneration": "later ones",
    "Molmo2ForConditionalGeneration": "later ones",
    "Gemma4UnifiedForConditionalGeneration": "later ones",
    "Ernie4_5_VLMoeForConditionalGeneration": "types of tokens",
    "Step3p7ForConditionalGeneration": "pixel_values_local",
    "Blip2ForConditionalGeneration": "no text without images",
    "MllamaForConditionalGeneration": "other layers",
}
"""Models that would be computed wrong, and a part of the reason."""
UNTESTED = {
    # Encoders of the package timm.
    *("FastVlmForConditionalGeneration", "PerceptionLMForConditionalGeneration", "gemma3n"),
    "DiffusionGemmaForBlockDiffusion",  # a diffusion model
    "EvollaForProteinText2Text",  # no auto class loads it
    *("shieldgemma2", "pp_chart2table"),  # configs of other classes
}
"""Models that cannot be made tiny, or that transformers itself cannot train."""
LEAST_EQUAL, LEAST_VIDEOS = 53, 18


@pytest.mark.parametrize("kind", KINDS)
def test_kind_of_inputs(rank_pools, kind):
    result = image_outcome(_name(KINDS[kind]), rank_pools[2])
    assert result.status == "equal", result


@pytest.mark.parametrize("kind", VIDEOS)
def test_videos(rank_pools, kind):
    result = image_outcome(_name(VIDEOS[kind]), rank_pools[2], "video")
    assert result.status == "equal", result


@pytest.mark.parametrize("model", REFUSED)
def test_refused(rank_pools, model):
    result = image_outcome(_name(model), rank_pools[2])
    assert result.status == "refused", result
    assert REFUSED[model] in result.told


def _name(model: str) -> str:
    """The name of a class in the survey."""
    names = transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return model if model in OF_IMAGES else next(t for t, name in names.items() if name == model)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, Outcome]]:
    return {"image": {}, "video": {}}


@pytest.mark.survey
@pytest.mark.parametrize("name", OF_IMAGES)
def test_equal_or_refused(rank_pools, outcomes, name):
    for modality in ("image", "video") if takes_videos(name) else ("image",):
        result = outcomes[modality][name] = image_outcome(name, rank_pools[2], modality)
        allowed = ("equal", "refused", "not tested") if name in UNTESTED else ("equal", "refused")
        assert result.status in allowed, result
        if result.status != "equal":
            assert len(result.told) > 20, "says too little"


@pytest.mark.survey
def test_the_page_is_current(outcomes):
    images, videos = outcomes["image"], outcomes["video"]
    if images.keys() != OF_IMAGES.keys():
        pytest.skip("only some models ran")
    assert sum(result.status == "equal" for result in images.values()) >= LEAST_EQUAL
    assert sum(result.status == "equal" for result in videos.values()) >= LEAST_VIDEOS
    # Else it is the page of another version.
    if f"transformers {transformers.__version__} was tested" in PAGE.read_text():
        part = without_errors(images_part(list(images.values()), videos))
        assert without_errors(PAGE.read_text()).endswith(part)
