"""What becomes of a causal language model of transformers on text, tiny, on two ranks with
ping-pong: equal or refused.

Each model trains in two ways: as the trainer does, which lays documents out anew, and in a custom
loop, whose batches come from a collator of transformers, with gradient checkpointing. A model with
rotary embeddings trains again with those that depend on the length of a document: as the trainer
does with longrope, and in a loop with dynamic NTK. Then padded sequences and documents have equal
prefixes.
"""

import math
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import DataCollatorWithFlattening, PreTrainedModel

from hf_distca.collator.padding_free import CollatorWithLengths
from hf_distca.config import DistCAConfig
from hf_distca.models.checkpointing import enable_checkpointing
from hf_distca.models.decoder import decoder_layers
from hf_distca.models.describe import describe_run
from hf_distca.models.rotary_types import rotary_modules
from hf_distca.plan import PLAN_KEY
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.trainer.assembly import make_dispatcher
from tests.models_and_batches import (
    cut_rows,
    exchanging,
    random_documents,
    reference_step,
    with_planning,
)
from tests.survey.sharing import (
    NEGLIGIBLE,
    Sharing,
    sharing_of_documents,
    sharing_of_sequences,
)
from tests.survey.tiny import stretched, tiny_model

LENGTHS = (40, 7, 33, 1, 26, 12, 1)
BLOCKS = {"balance_block_size": 4}
CONFIG = DistCAConfig(
    tokens_per_rank=64,
    planning=BLOCKS,
    exchange_timeout=20.0,
    loss_chunk_bytes=4 * 64 * 20,
)
ACCEPTED = 1e-4
"""Of the loss, and of a gradient, by the largest value of its tensor."""
ACCEPTED_OF_SHARED = 2e-4
"""The same with prefix sharing."""
Status = Literal["equal", "refused", "not tested", "wrong", "unclear error"]


@dataclass(frozen=True)
class Outcome:
    """Of one model, and how it lays documents out if it runs."""

    name: str
    status: Status
    told: str = ""  # the reason, or the error
    # The largest relative error of loss and gradients in each of WAYS, and of STRETCHED if the
    # model can have those.
    errors: dict[str, float] = field(default_factory=dict)
    layout: str = ""
    # What becomes of equal prefixes of "padded" sequences and of "documents".
    sharing: dict[str, Sharing] = field(default_factory=dict)


def outcome(name: str, pool: Any) -> Outcome:
    """The outcome for one model, on a pool of two ranks."""
    try:
        with torch.device("meta"):
            try:
                model = tiny_model(name, "distca")
            # A model that looks its implementation up in a list of its own.
            except KeyError:
                model = tiny_model(name, "eager")
    except Exception as error:  # whatever a config or a package that is missing raises
        return Outcome(name, "not tested", first_line(error))
    try:
        settings = describe_run(
            model, CONFIG, ranks=2, device=torch.device("cpu"), dtype=torch.float32
        ).plans
    except ValueError as error:
        return Outcome(name, "refused", str(error))
    compared = _compared(pool, Outcome(name, "equal", layout=settings.document_layout), None, WAYS)
    for rope_type, way in STRETCHED.items() if compared.status == "equal" else ():
        if can_stretch(name, model, rope_type):
            compared = _compared(pool, compared, rope_type, (way,))
    return _with_sharing(pool, compared) if compared.status == "equal" else compared


def _with_sharing(pool: Any, before: Outcome) -> Outcome:
    """The outcome with what becomes of equal prefixes."""
    sharing: dict[str, Sharing] = {}
    status = before.status
    told = before.told
    for name, function in (("padded", sharing_of_sequences), ("documents", sharing_of_documents)):
        kinds, errors = zip(*pool.run(function, before.name), strict=True)
        assert len(set(kinds)) == 1, kinds
        sharing[name] = kinds[0]
        if max(errors) > ACCEPTED_OF_SHARED:
            status = "wrong"
            told += f"; {name} with equal prefixes: {max(errors):.1e}"
    return replace(before, status=status, told=told, sharing=sharing)


Step = tuple[float, dict[str, Any]]
"""Loss and gradients of one rank, or of both."""
STOCK = "transformers does not compute text with it:"
"""Beginning of the error of a model that fails without hf_distca, too."""
WAYS = ("trainer", "loop")
STRETCHED = {"longrope": "trainer", "dynamic": "loop"}
"""Types of RoPE that depend on the length of a document, and the way in which each is tried."""


def can_stretch(name: str, model: PreTrainedModel, rope_type: str) -> bool:
    """Whether transformers itself runs a model with rotary embeddings that depend on the length of
    a document.
    """
    config = stretched(model, rope_type)
    if config is None:
        return False
    try:
        other = tiny_model(name, "eager", config)
        other(input_ids=torch.arange(3, 7)[None])
    except (
        ValueError,
        KeyError,
        RuntimeError,
    ):  # Gemma 4, for one, has another number of frequencies then
        return False
    return bool(rotary_modules(other))


def planned(name: str, rope_type: str | None, ways: tuple[str, ...]) -> tuple[str, list[Step]]:
    """On each rank: the error, if any, and else its steps in each of some ways and that of the
    reference.
    """
    documents = random_documents(LENGTHS)
    share = documents[dist.get_rank() :: 2]
    targets, of_share = (
        sum(max(len(document) - 1, 0) for document in documents_of_rank)
        for documents_of_rank in (documents, share)
    )
    try:
        # This rank's share of what one process computes with "eager", document by document.
        loss, gradients = reference_step(_model(name, "eager", rope_type), share)
    except Exception as error:  # such as a model that takes no text without images
        return f"{STOCK} {first_line(error)}", []
    try:
        model = _model(name, "distca", rope_type)
        dispatcher = make_dispatcher(
            model,
            replace(CONFIG, **with_planning({**BLOCKS, **exchanging(model)})),
            torch.device("cpu"),
        )
        steps = []
        for way in ways:
            if way == "trainer":  # rows of documents that are laid out anew
                plan = plan_micro_batch(LENGTHS, dispatcher.settings)
                rows = cut_rows(plan, dist.get_rank(), documents)
                batch = dispatcher.prepare({**rows, "labels": rows["shift_labels"], PLAN_KEY: plan})
            else:  # as in examples/accelerate_loop.py: documents as they lie, with checkpoints
                if model.supports_gradient_checkpointing:
                    enable_checkpointing(model, {"use_reentrant": False})
                collate = CollatorWithLengths(DataCollatorWithFlattening())
                batch = dispatcher.plan_batch(
                    collate([{"input_ids": document.tolist()} for document in share])
                )
            steps.append(_planned_step(model, batch, targets))
        part = of_share / targets
        return "", [
            *steps,
            (loss * part, {name: (grad * part).numpy() for name, grad in gradients.items()}),
        ]
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{first_line(error)} ({last.filename.split('/')[-1]}:{last.lineno})", []


def _planned_step(model: PreTrainedModel, batch: dict[str, Any], targets: int) -> Step:
    """This rank's loss and gradients of a batch that carries a plan; raises if the model did not
    follow the plan.
    """
    model.zero_grad()
    loss = model(**batch, num_items_in_batch=torch.tensor(targets)).loss
    loss.backward()
    plan = batch[PLAN_KEY].plan
    ran = batch[PLAN_KEY].ran
    turns = bool(decoder_layers(model))
    assert ran.attentions > 0, ran
    assert ran.layers_in_turns == ran.layers, ran
    assert (ran.layers > 0) == turns, ran
    assert len(plan.nano_batches) == 1 + turns, ran
    assert plan.summary.exchange.bytes_total > 0
    return loss.item(), {
        name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None
    }


def _model(name: str, implementation: str, rope_type: str | None) -> PreTrainedModel:
    config = None
    if rope_type is not None:
        with torch.device("meta"):
            config = stretched(tiny_model(name, "eager"), rope_type)
    torch.manual_seed(0)
    return tiny_model(name, implementation, config)


def summed(steps: Sequence[Step]) -> tuple[float, dict[str, Tensor]]:
    """The step of both ranks."""
    added: dict[str, Tensor] = {}
    for _, gradients in steps:
        for name, gradient in gradients.items():
            added[name] = added.get(name, 0) + torch.from_numpy(gradient)
    return sum(loss for loss, _ in steps), added


def worst_error(step: Step, expected: Step) -> tuple[str, float]:
    """What differs most of a step's loss and gradients, and how much, by its largest value."""
    (got, got_grads), (loss, grads) = step, expected
    least = NEGLIGIBLE * max(grad.abs().max() for grad in grads.values())
    zero = torch.zeros(())
    errors = {"loss": abs(got - loss) / abs(loss)}
    for name in {**got_grads, **grads}:
        one, other = got_grads.get(name, zero), grads.get(name, zero)
        errors[name] = ((one - other).abs().max() / torch.maximum(other.abs().max(), least)).item()
    # An error that is not a number is the worst.
    comparable = {name: math.inf if math.isnan(x) else x for name, x in errors.items()}
    worst = max(comparable, key=comparable.__getitem__)
    return worst, errors[worst]


def _compared(pool: Any, before: Outcome, rope_type: str | None, ways: tuple[str, ...]) -> Outcome:
    """The outcome with what became of further ways: losses and gradients beside those of the
    reference.
    """
    ranks = pool.run(planned, before.name, rope_type, ways)
    errors = [error for error, _ in ranks if error]
    if errors and errors[0].startswith(STOCK):
        return replace(before, status="not tested", told=errors[0])
    if errors:
        return replace(
            before, status="unclear error", told=f"{rope_type or ''} {' | '.join(errors)}".strip()
        )
    *steps, (expected, expected_grads) = (
        summed(parts) for parts in zip(*(steps for _, steps in ranks), strict=True)
    )
    told = [before.told] if before.told else []
    errors_of_ways = dict(before.errors)
    for way, step in zip(ways, steps, strict=True):
        worst, errors_of_ways[rope_type or way] = worst_error(step, (expected, expected_grads))
        told.append(f"{rope_type or way}: {worst}, loss {step[0]:.6f} for {expected:.6f}")
    status: Status = (
        "equal" if all(error < ACCEPTED for error in errors_of_ways.values()) else "wrong"
    )
    return replace(before, status=status, told="; ".join(told), errors=errors_of_ways)


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
