"""What becomes of a model of transformers on documents with images, tiny, on two ranks with
ping-pong: equal or refused.

Documents are cut across ranks, one document has no image, and others have several of different
sizes. Loss and gradients are compared with the stock model on one document at a time.
"""

import traceback
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hf_distca.batches.images import ImageModel
from hf_distca.collator.collation import DistCACollator, RankDocuments
from hf_distca.collator.documents import Columns
from hf_distca.collator.images import DocumentImages, read_images
from hf_distca.collator.sampler import GlobalMicroBatch, fit_documents
from hf_distca.models.describe import describe_run
from hf_distca.models.images import image_model, why_no_images
from hf_distca.plan import PLAN_KEY
from hf_distca.trainer.assembly import make_dispatcher
from tests.models_and_batches import exchanging, gradients_of, with_planning
from tests.survey.outcomes import (
    ACCEPTED,
    BLOCKS,
    CONFIG,
    STOCK,
    Outcome,
    Step,
    first_line,
    summed,
    worst_error,
)
from tests.survey.tiny import tiny_model
from tests.survey.tiny_images import (
    config_with_images,
    documents_with_images,
    is_of_timm,
    stock_inputs,
)

COUNTS = (2, 0, 1, 3, 0, 1)
"""Numbers of images of the documents."""


def image_outcome(name: str, pool: Any, modality: str = "image") -> Outcome:
    """The outcome for one model on documents with images, or with videos."""
    try:
        model = _shell(name)
    except Exception as error:  # whatever a config or a package that is missing raises
        return Outcome(name, "not tested", first_line(error))
    if is_of_timm(name):
        return Outcome(name, "not tested", "its encoder is one of the package timm")
    reason = why_no_images(model)
    if reason:
        return Outcome(name, "refused", reason)
    try:
        describe_run(model, CONFIG, ranks=2, device=torch.device("cpu"), dtype=torch.float32)
    except ValueError as error:
        return Outcome(name, "refused", str(error))
    ranks = pool.run(planned_with_images, name, modality)
    errors = [error for error, _ in ranks if error]
    if errors and errors[0].startswith(STOCK):
        return Outcome(name, "not tested", errors[0])
    if errors:
        return Outcome(name, "unclear error", " | ".join(errors))
    step, expected = (summed(parts) for parts in zip(*(steps for _, steps in ranks), strict=True))
    worst, error = worst_error(step, expected)
    told = f"{worst}, loss {step[0]:.6f} for {expected[0]:.6f}"
    return Outcome(name, "equal" if error < ACCEPTED else "wrong", told, {modality: error})


def takes_videos(name: str) -> bool:
    """Whether a model takes grids of videos, as hf_distca reads it."""
    try:
        images = image_model(_shell(name))
    except Exception:  # whatever a config or a package that is missing raises
        return False
    return images is not None and "video" in [known.name for known in images.modalities]


def _shell(name: str) -> Any:
    """The model without weights."""
    with torch.device("meta"):
        try:
            return tiny_model(name, "distca", config_with_images(name))
        # A model that looks its implementation up in a list of its own.
        except KeyError:
            return tiny_model(name, "eager", config_with_images(name))


def planned_with_images(name: str, modality: str) -> tuple[str, list[Step]]:
    """On each rank: the error, if any, and else the planned step and that of the stock model."""
    try:
        stock = _model(name, "eager")
        known = {known.name: known for known in _images_of(stock).modalities}[modality]
        documents = documents_with_images(stock, known, COUNTS)
        targets = sum(len(document["input_ids"]) - 1 for document in documents)
        expected = _stock_step(stock, known, documents[dist.get_rank() :: 2], targets)
    except Exception as error:  # such as a config that makes no encoder
        return f"{STOCK} {_where(error)}", []
    try:
        model = _model(name, "distca")
        tokens = targets + len(documents)
        config = replace(
            CONFIG,
            **with_planning({**BLOCKS, **exchanging(model)}),
            tokens_per_rank=-(-tokens // dist.get_world_size()),
        )
        dispatcher = make_dispatcher(model, config, torch.device("cpu"))
        batch = dispatcher.prepare(_batch(model, documents, dispatcher.settings))
        loss = model(**batch, num_items_in_batch=torch.tensor(targets)).loss
        loss.backward()
        assert batch[PLAN_KEY].ran.attentions > 0
        gradients = {name: grad.numpy() for name, grad in gradients_of(model).items()}
        return "", [(loss.item(), gradients), expected]
    except Exception as error:
        return _where(error), []


def _stock_step(model: Any, modality: Any, documents: list[dict[str, Any]], targets: int) -> Step:
    """This rank's share of what one process computes document by document."""
    total = 0.0
    for document in documents:
        inputs = stock_inputs(model, modality, document)
        logits = model(**inputs).logits[0, :-1].float()
        labels = inputs["input_ids"][0, 1:]
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / targets
        loss.backward()
        total += loss.item()
    return total, {name: grad.numpy() for name, grad in gradients_of(model).items()}


def _batch(model: Any, documents: list[dict[str, Any]], settings: Any) -> dict[str, Any]:
    """This rank's rows of all documents, and the images that it encodes."""
    images = _images_of(model)
    columns = Columns(images=images.fields)
    part = read_images(documents, images, columns, "the data set", (0, 1))
    lengths = np.frombuffer(part.lengths, np.int64)
    reader = RankDocuments(
        documents,
        lengths,
        settings,
        dist.get_rank(),
        columns,
        images=DocumentImages.of_parts(images, [part]),
    )
    spans = fit_documents(lengths, int(lengths.sum()), "error", "all tokens")
    return DistCACollator(dist.get_rank())([reader[GlobalMicroBatch(spans)]])


def _images_of(model: Any) -> ImageModel:
    images = image_model(model)
    assert images is not None
    return images


def _model(name: str, implementation: str) -> Any:
    torch.manual_seed(0)
    return tiny_model(name, implementation, config_with_images(name))


def _where(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{first_line(error)} ({last.filename.split('/')[-1]}:{last.lineno})"
