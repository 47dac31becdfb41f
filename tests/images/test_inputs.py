"""Fields of documents' images by kind of encoder, and what is refused of them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hf_distca.batches.images import Field, Modality
from hf_distca.checks.launch_rules import TRAINER
from hf_distca.checks.refusal import errors_of
from hf_distca.checks.step_rules import PlannedStep
from hf_distca.collator.collation import RankDocuments
from hf_distca.collator.images import DocumentImages
from hf_distca.config import DistCAConfig
from hf_distca.dispatch.features import BoundImages
from hf_distca.memory.fitting import log_memory
from hf_distca.models.describe import describe_run
from hf_distca.models.images import image_model, why_no_images
from hf_distca.plan import FEATURES, PlannedImages
from hf_distca.planner.images import IMAGE, PLACEHOLDERS
from hf_distca.planner.prefixes import SequencePaths
from hf_distca.planner.sequences import plan_sequences
from tests.images.families import tiny_model
from tests.models_and_batches import small_model
from tests.planner.test_pods import settings_of
from tests.refused import refused

TOKEN = 9
TILES = Modality(
    "image",
    TOKEN,
    "document",
    (Field("pixel_values", (1, 2, 3, 2, 2), 0.0), Field("image_sizes", (1, 2), (2, 2))),
    patch=1,
    padded=True,
)
STRIP = Modality(
    "image",
    TOKEN,
    "document",
    (Field("pixel_values", (1, 3, 1, 4), 0.0, axis=3), Field("target_sizes", (1, 2), 2)),
    patch=1,
)
ROW = Modality(
    "image",
    TOKEN,
    "even",
    (Field("pixel_values", (1, 1, 3, 2, 2), 1.0, axis=1),),
    patch=1,
)
MERGES = Modality(
    "image",
    TOKEN,
    "grid",
    (
        Field("pixel_values", (1, 3), 0.0),
        Field("image_grid_thw", (1, 3), 1),
        Field("image_merge_sizes", (1,), 1),
    ),
    patch=1,
    merges="image_merge_sizes",
)
PLANES = Modality(
    "image",
    TOKEN,
    "grid",
    (Field("pixel_values", (4, 3), 0.0), Field("image_grid_hw", (1, 2), (2, 2))),
    patch=1,
    merge=2,
)


def tiles(images: int, count: int, value: float = 1.0) -> dict[str, Any]:
    """Images of a document, each with so many tiles."""
    sizes = np.full((images, 2), 2)
    return {"pixel_values": np.full((images, count, 3, 2, 2), value), "image_sizes": sizes}


def tokens(placeholders: int) -> Any:
    return np.array([1, *[TOKEN] * placeholders, 2])


def test_images_of_a_document_are_one_unit():
    example = tiles(3, 4)
    assert TILES.count(example) == 1
    figures = TILES.figures(example, tokens(5), "it")
    assert figures.rows.tolist() == [5]
    assert figures.patches.tolist() == [3 * 4 * 2 * 2]
    assert figures.pairs.tolist() == [48**2 // 3]
    selected = TILES.select(example, [0])
    assert {name: value.shape for name, value in selected.items()} == {
        "pixel_values": (3, 4, 3, 2, 2),
        "image_sizes": (3, 2),
    }


def test_documents_are_padded_to_the_most_tiles():
    joined = TILES.joined([tiles(1, 2), tiles(2, 3)])
    pixels = joined["pixel_values"]
    assert pixels.shape == (3, 3, 3, 2, 2)
    assert pixels.flatten(2).sum(2).tolist() == [[12, 12, 0], [12, 12, 12], [12, 12, 12]]
    assert joined["image_sizes"].tolist() == [[2, 2]] * 3


def test_documents_without_images():
    for modality in (TILES, STRIP, ROW, MERGES, PLANES):
        assert modality.count({}) == 0
        assert [part.tolist() for part in modality.figures({}, tokens(0), "it")] == [[], [], []]


def test_patches_lie_side_by_side():
    strips = [
        {"pixel_values": np.ones((1, 3, 1, 4)), "target_sizes": np.array([[2, 2]])},
        {"pixel_values": np.ones((1, 3, 1, 6)), "target_sizes": np.array([[2, 3]])},
    ]
    joined = STRIP.joined(strips)
    assert joined["pixel_values"].shape == (1, 3, 1, 10)
    assert joined["target_sizes"].tolist() == [[2, 2], [2, 3]]


def test_images_of_a_row_of_the_batch():
    example = {"pixel_values": np.arange(3.0).reshape(1, 3, 1, 1, 1) * np.ones((1, 3, 3, 2, 2))}
    assert ROW.count(example) == 3
    assert ROW.figures(example, tokens(6), "it").rows.tolist() == [2, 2, 2]
    assert ROW.select(example, [2, 0])["pixel_values"][0, :, 0, 0, 0].tolist() == [2, 0]
    # An image of zeros would count as padding.
    assert ROW.filler_image()["pixel_values"].min() == 1


def test_rows_of_grids():
    grids = np.array([[1, 4, 4], [2, 2, 4]])
    example = {"image_grid_thw": grids, "image_merge_sizes": np.array([1, 2])}
    example["pixel_values"] = np.arange(32.0)[:, None] * np.ones(3)
    figures = MERGES.figures(example, tokens(16 + 4), "it")
    assert figures.rows.tolist() == [16, 4]
    assert figures.pairs.tolist() == [16**2, 2 * 8**2]
    second = MERGES.select(example, [1])
    assert second["pixel_values"][:, 0].tolist() == list(range(16, 32))
    assert second["image_merge_sizes"].tolist() == [2]
    example = {"image_grid_hw": np.array([[2, 4]]), "pixel_values": np.ones((8, 3))}
    figures = PLANES.figures(example, tokens(2), "it")
    assert [part.tolist() for part in figures] == [[2], [8], [64]]
    assert PLANES.filler_image()["image_grid_hw"].tolist() == [[2, 2]]


def test_a_missing_field_is_refused():
    with pytest.raises(ValueError, match=r"it has images in \['pixel_values'\] and no \['image_s"):
        TILES.figures({"pixel_values": np.ones((1, 2, 3, 2, 2))}, tokens(3), "it")


def test_other_rows_than_planned_are_an_error():
    features = np.zeros(1, FEATURES)
    features["stop"] = 3
    planned = PlannedImages(np.array([3]), np.array([0]), features)
    groups: Any = SimpleNamespace(rank=0)
    bound = BoundImages(planned, groups, range(1), torch.device("cpu"))
    assert bound.to_placeholders(torch.eye(3)).tolist() == torch.eye(3).tolist()
    with refused(PlannedStep.OTHER_FEATURES, rows=4, placeholders=3):
        bound.to_placeholders(torch.ones(4, 3))


def images_of(*documents: int) -> DocumentImages:
    """Images of these documents; the one with number n has n + 1 placeholders from row n on."""
    images = np.zeros(len(documents), IMAGE)
    images["document"] = documents
    images["rows"] = 1 + np.arange(len(documents))
    placeholders = np.zeros(len(documents), PLACEHOLDERS)
    placeholders["image"] = placeholders["start"] = np.arange(len(documents))
    placeholders["stop"] = placeholders["start"] + images["rows"]
    model: Any = SimpleNamespace(modalities=[SimpleNamespace(name="image")])
    return DocumentImages(model, images, placeholders)


def test_images_of_chosen_documents_have_the_places_of_their_documents():
    of_dataset = images_of(0, 0, 2, 3)
    drawn = of_dataset.of_documents(np.array([3, 1, 0]))
    assert drawn.images[["document", "rows"]].tolist() == [(0, 4), (2, 1), (2, 2)]
    assert drawn.placeholders[["image", "start"]].tolist() == [(0, 3), (1, 0), (2, 1)]
    of_pod = of_dataset.of_documents(np.array([3, 1, 0]), np.array([1, 2]))
    assert of_pod.images[["document", "rows"]].tolist() == [(2, 1), (2, 2)]
    assert of_pod.placeholders[["image", "start"]].tolist() == [(0, 0), (1, 1)]


def test_a_pod_plans_the_images_of_its_documents():
    """One of four documents has images. All ranks run the encoder."""
    lengths = np.array([12, 12, 12, 12])
    of_plans = settings_of(4, 16, 2)
    planned = []
    for rank in range(4):
        reader = RankDocuments([], lengths, of_plans, rank, images=images_of(2, 2))
        sequences = plan_sequences(SequencePaths.unshared(lengths), lengths, of_plans, rank=rank)
        sequences, images = reader._with_images(reader.images, sequences, np.arange(4))
        (plan,) = sequences.plans
        planned.append((plan.ranks, plan.images["image"], images.encoded_by(plan.images, rank)))
    assert [ranks for ranks, *_ in planned] == [range(2)] * 2 + [range(2, 4)] * 2
    with_images = [len(images.encoders) for _, images, _ in planned]
    assert with_images in ([2, 2, 0, 0], [0, 0, 2, 2])
    for ranks, images, _ in planned:
        assert np.isin(images.encoders, ranks).all()
        assert np.isin(images.features["rank"], ranks).all()
    assert {document for *_, encoded in planned for document in encoded.tolist()} == {2}


def test_a_model_of_text_has_no_images():
    model = small_model()
    assert image_model(model) is None
    assert "get_image_features" in why_no_images(model)


@pytest.mark.parametrize("sees_images", [False, True])
def test_a_trainings_counted_memory_says_that_it_is_without_images(sees_images):
    model = tiny_model("llava", "distca") if sees_images else small_model()
    config = DistCAConfig(tokens_per_rank=64)
    run = describe_run(model, config, ranks=2, device=torch.device("cpu"))
    counted = log_memory(model, run, 10**10)
    assert counted is not None
    assert counted.listed.endswith("without the images that are encoded, see hf-distca plan") == (
        sees_images
    )


def test_the_refusal_of_images_says_why():
    (rule,) = (rule for rule in TRAINER if "{0.why_no_images}" in rule.reason)
    facts = SimpleNamespace(
        trainer="DistCASFTTrainer", model="M", has_images=True, packs=True, why_no_images="it is M"
    )
    (error,) = errors_of([rule], facts)
    assert "for M, but the images of this model cannot be divided among ranks: it is M;" in str(
        error
    )
    facts.why_no_images = ""
    assert not errors_of([rule], facts)
