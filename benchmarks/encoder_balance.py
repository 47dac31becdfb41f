"""Encoders of images: work of the busiest rank, planned and where documents lie.

Chats have 0 to 40 images of different sizes, for a model of the sizes of Qwen3-VL-8B: an encoder of
27 layers 1152 wide, patches of 16 pixels, 4 patches for a row of features. Each rank holds at most
32768 tokens, in nodes of 8. Micro-batches are drawn and planned as in training. Then each image is
encoded in two ways:

  planned     on the rank that `plan_images` gives it
  in place    on the rank that holds its first placeholder

Patches, work of the encoder, features that travel and pixels are counted, not timed. Work is the
number of multiplications of the encoder's layers. Seconds of a forward and a backward are predicted
with the costs of an H100, under activation checkpointing. Features and their gradients are
bfloat16, and pixels are float32. A rank reads whole documents: those with rows on the rank, and
those with images that the rank encodes.

Steps are predicted too: with the plan and its encoders, with the plan and encoders in place, and
without plans. There each rank encodes the images of its documents.

Run: python benchmarks/encoder_balance.py [--batches 100]
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from harness import options_parser, print_json, print_rows
from harness.simulated import simulated_run
from numpy.typing import NDArray
from transformers import AutoModelForImageTextToText, Qwen3VLConfig

from hf_distca.batches.images import ImageModel
from hf_distca.collator.documents import Columns
from hf_distca.collator.images import DocumentImages, read_images
from hf_distca.collator.sampler import GlobalBatchSampler, fit_documents
from hf_distca.models.images import image_model
from hf_distca.plan import PlannedImages
from hf_distca.plan.arrays import Table
from hf_distca.plan.images import travelling_rows
from hf_distca.planner.images import plan_images
from hf_distca.planner.prefixes import SequencePaths
from hf_distca.planner.sequences import NO_SEQUENCE, on_rank, plan_sequences
from hf_distca.predict.encoders import encoder_costs
from hf_distca.predict.shapes import ModelShape
from hf_distca.run import RunSpec
from hf_distca.sim.encoders import SimulatedImages, with_encoders
from hf_distca.sim.strategies import PLAIN, WHOLE, plain, step_of_plan, whole_documents

TOKENS, NODE = 32768, 8
"""Tokens of a rank, and ranks of a node."""
RANKS = (8, 64)
CHATS = 20000
IMAGES = ((0, 0), (1, 4), (5, 12), (13, 40))
"""Least and most images of a chat, of each kind of chats."""
SHARES = (0.3, 0.4, 0.2, 0.1)
"""Shares of the kinds."""
AREA = (128**2, 1536**2)
"""Smallest and largest images in pixels; the logarithm of the area is uniform."""
TEXT = (600, 1.0, 8000)
"""Tokens of text of a chat: median and sigma of lognormal lengths, and the most."""
WIDTH, LAYERS = 4096, 4
"""Width of a row of features; rows of as many layers of the encoder enter the text model."""
PATCH_VALUES = 3 * 2 * 16**2
"""Numbers of a patch: colours, frames, pixels."""
BFLOAT16, FLOAT32 = 2, 4
QWEN3_8B = ModelShape.llama(36, 4096, 12288, 32, 8, 151936)
"""Text model of Qwen3-VL-8B."""


def seeing_model() -> ImageModel:
    """Return how a model of the sizes of Qwen3-VL-8B takes images."""
    text = {"hidden_size": WIDTH, "num_hidden_layers": 1}
    vision = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16}
    vision |= {"spatial_merge_size": 2, "out_hidden_size": WIDTH}
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(
            Qwen3VLConfig(text_config=text, vision_config=vision)
        )
    found = image_model(model)
    assert found is not None
    return replace(found, modalities=found.modalities[:1])


class Chats(Sequence[dict[str, Any]]):
    """Chats with images: tokens, and grids of patches instead of pixels.

    Args:
        token_id: token of a placeholder.
    """

    def __init__(self, count: int, token_id: int) -> None:
        self._count = count
        self._token_id = token_id

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> dict[str, Any]:
        random = np.random.default_rng([0, index])
        least, most = IMAGES[random.choice(len(IMAGES), p=SHARES)]
        grids = [_grid(random) for _ in range(random.integers(least, most + 1))]
        median, sigma, longest = TEXT
        text = int(min(max(random.lognormal(np.log(median), sigma), 16), longest))
        # Text is divided evenly around the images.
        parts = np.full(len(grids) + 1, text // (len(grids) + 1))
        tokens = [np.zeros(parts[0], np.int64)]
        for grid, part in zip(grids, parts[1:], strict=True):
            tokens.append(np.full(int(np.prod(grid)) // 4, self._token_id))
            tokens.append(np.zeros(part, np.int64))
        chat: dict[str, Any] = {"input_ids": np.concatenate(tokens)}
        if not grids:
            return chat
        # Zeros that take no memory: only sizes are counted.
        pixels = np.broadcast_to(np.float32(0), (int(np.prod(grids, 1).sum()), PATCH_VALUES))
        return {**chat, "image_grid_thw": np.array(grids), "pixel_values": pixels}


def _grid(random: np.random.Generator) -> tuple[int, int, int]:
    """Return frames, rows and columns of patches of an image."""
    area = np.exp(random.uniform(*np.log(AREA)))
    aspect = np.exp(random.uniform(-np.log(2), np.log(2)))
    sides = np.sqrt(area * np.array([aspect, 1 / aspect]))
    rows, columns = (2 * np.maximum(np.round(sides / 32), 1)).astype(int).tolist()
    return 1, rows, columns


@dataclass(frozen=True)
class Documents:
    """Documents with images, and the patches of their images."""

    images: DocumentImages
    lengths: NDArray[np.int64]

    @classmethod
    def drawn(cls, count: int) -> "Documents":
        model = seeing_model()
        (modality,) = model.modalities
        columns = Columns(images=frozenset(modality.fields))
        part = read_images(Chats(count, modality.token_id), model, columns, "chats", (0, 1))
        images = DocumentImages.of_parts(model, [part])
        assert images is not None
        return cls(images, np.frombuffer(part.lengths, np.int64))

    def micro_batches(self, ranks: int, count: int) -> Iterator[NDArray[np.int64]]:
        """Yield the documents of micro-batches, as training draws them."""
        capacity = ranks * TOKENS
        spans = fit_documents(self.lengths, capacity, "error", "all ranks")
        sampler = GlobalBatchSampler(spans, capacity)
        epoch = drawn = 0
        while drawn < count:
            sampler.set_epoch(epoch)
            for (batch,) in islice(sampler, count - drawn):
                yield batch.spans["document"]
                drawn += 1
            epoch += 1


def in_place(planned: PlannedImages) -> PlannedImages:
    """Return images that are encoded where their first placeholder is."""
    first = np.flatnonzero(planned.features["start"] == 0)
    encoders = np.zeros(len(planned.rows), np.int64)
    encoders[planned.features["image"][first]] = planned.features["rank"][first]
    return replace(planned, encoders=encoders)


def figures(
    planned: PlannedImages,
    images: DocumentImages,
    of_images: NDArray[np.float64],
    held: Table,
    ranks: int,
) -> dict[str, float]:
    """Return what the encoders of a micro-batch take.

    Args:
        images: of the micro-batch.
        of_images: [images] predicted seconds of each.
        held: rows of documents that ranks hold, of dtype TOKENS.
    """
    patches = 4 * planned.rows
    of_ranks = np.bincount(planned.encoders, patches, ranks)
    work = np.bincount(planned.encoders, images.images["cost"], ranks)
    seconds = np.bincount(planned.encoders, of_images, ranks)
    of_documents = np.bincount(images.images["document"], patches)
    read = []
    for rank in range(ranks):
        used = on_rank(held, rank)["sequence"]
        used = np.append(used[used != NO_SEQUENCE], images.encoded_by({"image": planned}, rank))
        used = np.unique(used)
        read.append(of_documents[used[used < len(of_documents)].astype(int)].sum())
    # Features in the forward, their gradients in the backward.
    row_bytes = 2 * LAYERS * WIDTH * BFLOAT16
    patch_bytes = PATCH_VALUES * FLOAT32
    return {
        "patches, busiest over mean": float(of_ranks.max() / of_ranks.mean()),
        "work, busiest over mean": float(work.max() / work.mean()),
        "busiest, s": float(seconds.max()),
        "mean, s": float(seconds.mean()),
        "travelling, GB": travelling_rows(planned) * row_bytes / 1e9,
        "travelling, of all rows": travelling_rows(planned) / max(int(planned.rows.sum()), 1),
        "pixels encoded by the mean rank, GB": float(of_ranks.mean()) * patch_bytes / 1e9,
        "pixels read by the mean rank, GB": float(np.mean(read)) * patch_bytes / 1e9,
        "pixels read by the busiest rank, GB": float(np.max(read)) * patch_bytes / 1e9,
    }


def both(documents: Documents, chosen: NDArray[np.int64], run: RunSpec) -> dict[str, Any]:
    """Return the figures of a micro-batch, planned and in place, and predicted steps."""
    settings = run.plans
    lengths = documents.lengths[chosen]
    sequences = plan_sequences(SequencePaths.unshared(lengths), lengths, settings)
    images = documents.images.of_documents(chosen)
    planned = plan_images(
        images.images, images.placeholders, sequences.rank_rows, range(settings.ranks), ["image"]
    )["image"]
    costs = encoder_costs(images.model.encoder, run.device, checkpointing=True)
    seconds = costs.seconds(images.images["patches"], images.images["pairs"])
    encoded = {"planned": planned, "in place": in_place(planned)}
    found: dict[str, Any] = {
        name: figures(each, images, seconds, sequences.rank_rows, settings.ranks)
        for name, each in encoded.items()
    }
    # Steps, by strategy.
    timed = images.images.copy()
    timed["cost"] = seconds
    batch = SimulatedImages(timed, images.placeholders, LAYERS * WIDTH * BFLOAT16)
    (plan,) = sequences.plans
    step = with_encoders(step_of_plan(plan, run), [plan], batch, lengths, run)
    assert step.encoder is not None
    more = found["in place"]["busiest, s"] - float(step.encoder.max())
    without_plans = {PLAIN: plain(lengths, run), WHOLE: whole_documents(lengths, run)}
    found["steps"] = {
        "hf_distca": step.seconds,
        "hf_distca, encoders in place": step.seconds + more,
        **{
            name: with_encoders(each, [], batch, lengths, run).seconds
            for name, each in without_plans.items()
        },
    }
    return found


def together(batches: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return mean and worst of the figures of micro-batches."""
    return {
        name: {
            "mean": float(np.mean([batch[name] for batch in batches])),
            "worst": max(batch[name] for batch in batches),
        }
        for name in batches[0]
    }


def shown(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table, one for each figure."""
    for figure in next(iter(found.values())):
        cells = {
            f"{name}, {kind}": value
            for name, of in found.items()
            for kind, value in of[figure].items()
        }
        yield {"figure": figure, **cells}


def main() -> None:
    options = options_parser(__doc__, batches=(100, "micro-batches")).parse_args()
    documents = Documents.drawn(CHATS)
    found: dict[str, Any] = {}
    steps: dict[str, Any] = {}
    for ranks in RANKS:
        run = simulated_run(QWEN3_8B, ranks, TOKENS, NODE)
        batches = [
            both(documents, chosen, run)
            for chosen in documents.micro_batches(ranks, options.batches)
        ]
        found[str(ranks)] = {
            name: together([batch[name] for batch in batches]) for name in batches[0]
        }
        steps[str(ranks)] = found[str(ranks)].pop("steps")
        print(steps[str(ranks)])
        print(f"{ranks} ranks")
        print_rows(list(shown(found[str(ranks)])))
    rows_of_images = documents.images.images["rows"]
    counts = np.bincount(documents.images.images["document"], minlength=CHATS)
    print_json(
        ranks=found,
        documents={
            "chats": CHATS,
            "median images of a chat": float(np.median(counts)),
            "mean images of a chat": float(counts.mean()),
            "median placeholders of an image": float(np.median(rows_of_images)),
            "placeholders, of all tokens": float(rows_of_images.sum() / documents.lengths.sum()),
            "median tokens of a chat": float(np.median(documents.lengths)),
            "longest chat": int(documents.lengths.max()),
        },
        steps=steps,
        batches=options.batches,
    )


if __name__ == "__main__":
    main()
