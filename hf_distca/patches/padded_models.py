"""Padded batches: a model that takes padded batches, and computes their tokens packed and planned.

`pack_backbone` gives the backbone of a model (the model without its head) a subclass of its own
class. The subclass's forward packs `input_ids` [B, L] by `attention_mask` [B, L], runs the planned
micro-batches one after another, and returns hidden states [B, L, H]. The head, and everything that
calls the model, sees a padded batch.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from transformers.utils.generic import ModelOutput

from hf_distca.checks.batch_rules import Batch
from hf_distca.checks.model_rules import Models
from hf_distca.checks.refusal import check, given_as
from hf_distca.collator.documents import TOKEN_TYPES
from hf_distca.dispatch.padded_rows import PackedBatch, PaddedBatch, PaddedBatches
from hf_distca.models import positions
from hf_distca.models.decoder import backbone, base_model, stock_forward
from hf_distca.models.model_facts import GivenModel
from hf_distca.models.sharing import log_no_sharing
from hf_distca.patches import noise
from hf_distca.patches.image_inputs import read_padded_images
from hf_distca.patches.modules import subclass, uncompiled
from hf_distca.patches.offload import wrap_checkpoints
from hf_distca.plan import PLAN_KEY

NOT_PER_TOKEN = ("cache_position",)
"""Arguments that only number the columns of a batch."""
NOT_OF_TOKENS = ("image_hidden_states", "rope_deltas")
"""Outputs of models that take images: features of the images, and a figure of each sequence."""
INTEGERS = (torch.int64, torch.int32, torch.bool)
"""Dtypes of what a model may be told about each token."""


def pack_backbone(model: nn.Module, batches: PaddedBatches) -> None:
    """Let a model compute padded batches as planned micro-batches, in place.

    The model is prepared by `prepare_model`, or is never trained. It may be wrapped by FSDP2 or
    DeepSpeed already.

    Raises:
        ValueError: The model's head reads padding.
    """
    check((Models.READS_PADDING,), GivenModel(model))
    base: Any = base_model(model)
    packed: Any = backbone(base)
    if not isinstance(packed, PackedBackbone):
        packed.__class__ = subclass(type(packed), PackedBackbone)
        if hasattr(type(base), "generate"):
            base.__class__ = subclass(type(base), _Generating)
        if packed is not base:
            base.__class__ = subclass(type(base), _AroundBackbone)
        packed.counts_from_first_token = positions.are_relative(model)
    packed.batches = batches


def plan_ahead(model: nn.Module, batches: Sequence[dict[str, Tensor]]) -> None:
    """Begin to plan padded batches that a model is given later. A collective call.

    Planning goes on while the model computes. Other batches, or the same ones in another order, may
    come.

    Args:
        model: a model that `pack_backbone` has seen, unwrapped.
        batches: `input_ids` and `attention_mask` [B, L] of each batch.
    """
    packed: Any = backbone(base_model(model))
    packed.batches.plan_ahead(lambda: [packed.padded_batch(batch) for batch in batches])


class _Generating:
    """Base that precedes the class of a model that generates."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as the model does without planned attention."""
        inner: Any = super()
        model: Any = self
        packed: Any = backbone(model)
        with unpacked(packed):
            return inner.generate(*args, **kwargs)


class _AroundBackbone(nn.Module):
    """Base that precedes the class of a model that calls its backbone."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model.

        Raise RefusedError, on every rank, if it computes a padded batch without the backbone.
        """
        model: Any = self
        packed: Any = backbone(model)
        packed.ran = False
        output = super().__call__(*args, **kwargs)
        if packed.packs and not packed.ran and _is_padded_batch(kwargs):
            raise Batch.PASSED_BY.error(model=type(self).__name__, backbone=type(packed).__name__)
        return output


@contextmanager
def unpacked(packed: "PackedBackbone") -> Iterator[None]:
    """Let a backbone run batches as they are, each rank for itself."""
    previous = packed.packs
    packed.packs = False
    try:
        yield
    finally:
        packed.packs = previous


class PackedBackbone(nn.Module):
    """Forward of a backbone that packs padded batches; a base class before the backbone's own."""

    batches: PaddedBatches
    counts_from_first_token: bool  # whether a sequence's positions begin at its first token
    packs = True  # whether padded batches are packed
    ran = False  # whether it has run since its model's forward began

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a padded batch packed and planned.

        Run a planned micro-batch, and generation, as they are.
        """
        self.ran = True
        names = inspect.signature(stock_forward(self)).parameters
        arguments = dict(zip(list(names)[1:], args, strict=False)) | kwargs
        if not self.packs or not _is_padded_batch(arguments):
            return super().forward(*args, **kwargs)
        return self._packed_forward(arguments, may_cache="use_cache" in names)

    @uncompiled("padded batches are packed by plans that are new with each batch")
    def _packed_forward(self, arguments: dict[str, Any], *, may_cache: bool) -> Any:
        forward = super().forward
        other_arguments = {
            name: value
            for name, value in arguments.items()
            if value is not None and not _is_of_tokens(value)
        }
        packed = self.batches.pack(lambda: self.padded_batch(arguments))
        if self.training and torch.is_grad_enabled():
            self.batches.see_trained(packed)
        if may_cache:
            other_arguments["use_cache"] = False
        results = []
        for inputs, plan in packed.micro_batches:
            wrap_checkpoints(self, plan)
            with noise.noise_of_rows(self, inputs) as of_model:
                results.append(forward(**of_model, **other_arguments, **{PLAN_KEY: plan}))
        return _padded_result(results, packed)

    def padded_batch(self, arguments: dict[str, Any]) -> PaddedBatch:
        """Return the padded batch among the arguments, with its images if the model takes any."""
        batch = self._batch_of(arguments)
        if not noise.is_drawn(self):
            return batch
        rank = self.batches.dispatcher.groups.rank
        log_no_sharing(noise.REASON, rank)
        columns = noise.columns_of_noise(batch.mask, rank)
        return PaddedBatch(batch.columns | columns, batch.mask, batch.images)

    def _batch_of(self, arguments: dict[str, Any]) -> PaddedBatch:
        model = self.batches.image_model
        from_first_token = self.counts_from_first_token
        if model is None:
            return _padded_batch(arguments, from_first_token=from_first_token)
        # Types of tokens follow from the tokens.
        others = {*model.fields, TOKEN_TYPES}
        batch = _padded_batch(
            {k: v for k, v in arguments.items() if k not in others},
            from_first_token=from_first_token,
        )
        rank = self.batches.dispatcher.groups.rank
        columns = dict(batch.columns)
        numbers_BL = columns["position_ids"]
        images, positions_ABL = read_padded_images(arguments, model, batch.mask, numbers_BL, rank)
        if positions_ABL is not None and arguments.get("position_ids") is None:
            columns["position_ids"] = positions_ABL
        return PaddedBatch(columns, batch.mask, images)


def _is_padded_batch(arguments: dict[str, Any]) -> bool:
    """Return whether a forward has a batch to pack: neither a planned one nor generation's."""
    is_planned = arguments.get(PLAN_KEY) is not None
    generates = arguments.get("past_key_values") is not None or bool(arguments.get("use_cache"))
    return not is_planned and not generates


def _is_of_tokens(value: Any) -> bool:
    """Return whether an argument has values of tokens.

    A number such as num_items_in_batch has none.
    """
    return isinstance(value, Tensor) and value.ndim > 0


def _padded_batch(arguments: dict[str, Any], *, from_first_token: bool) -> PaddedBatch:
    """Return the padded batch among the arguments of a backbone.

    Args:
        from_first_token: whether positions that are not given begin at the first token of each
            sequence, so that sequences with unequal padding share prefixes. Otherwise they are the
            numbers of columns, which models count themselves.
    """
    input_ids_BL = arguments.get("input_ids")
    if not isinstance(input_ids_BL, Tensor) or input_ids_BL.ndim != 2:
        raise Batch.NO_TOKEN_IDS.error()
    shape = input_ids_BL.shape
    mask_BL = arguments.get("attention_mask")
    if mask_BL is None:
        mask_BL = torch.ones_like(input_ids_BL)
    if not isinstance(mask_BL, Tensor) or mask_BL.shape != shape:
        is_tensor = isinstance(mask_BL, Tensor)
        found = f"of the shape {tuple(mask_BL.shape)}" if is_tensor else given_as(mask_BL)
        raise Batch.OTHER_MASK.error(found=found, shape=tuple(shape))
    if from_first_token:
        numbers_BL = (mask_BL != 0).long().cumsum(1) - 1
    else:
        numbers_BL = torch.arange(shape[1], device=input_ids_BL.device).expand(shape)
    columns = {"input_ids": input_ids_BL.long(), "position_ids": numbers_BL}
    for name, value in arguments.items():
        if name in ("input_ids", "attention_mask", *NOT_PER_TOKEN) or not _is_of_tokens(value):
            continue
        if value.dtype not in INTEGERS or value.shape not in (shape, (1, shape[1])):
            raise Batch.OTHER_INPUT.error(name=name, found=tuple(value.shape), shape=tuple(shape))
        columns[name] = value.long().expand(shape)
    return PaddedBatch(columns, mask_BL)


def _padded_result(results: list[Any], packed: PackedBatch) -> Any:
    """Return the outputs of all micro-batches as one output for the padded batch."""
    results = [_of_tokens(result) for result in results]
    outputs: list[list[Tensor]] = []  # of each micro-batch, [rows, ...]
    for result, (_, plan) in zip(results, packed.micro_batches, strict=True):
        if plan.ran.attentions == 0:
            raise Batch.LOST_PADDED_PLAN.error()
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        outputs.append(
            [tensor.squeeze(0) if _has_batch(tensor, plan.rows) else tensor for tensor in tensors]
        )
    returned = iter(packed.returned(outputs))

    # The first micro-batch has the structure of all of them.
    leaves, structure = tree_flatten(results[0])
    rows = packed.micro_batches[0][1].rows
    shape = packed.travel.shape

    def padded(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        rows_F = next(returned)
        return rows_F.unflatten(0, shape) if _has_batch(leaf, rows) else rows_F

    return tree_unflatten([padded(leaf) for leaf in leaves], structure)


def _of_tokens(result: Any) -> Any:
    """Return the output of a backbone without what has no row for each token."""
    if not isinstance(result, ModelOutput):
        return result
    return type(result)(**{k: v for k, v in result.items() if k not in NOT_OF_TOKENS})


def _has_batch(output: Tensor, rows: int) -> bool:
    """Return whether an output has a batch dimension before its rows.

    Hidden states are [1, rows, ...], and a router's logits are [rows, ...].
    """
    if output.shape[:2] == (1, rows):
        return True
    if output.shape[:1] == (rows,):
        return False
    raise Batch.OTHER_OUTPUT.error(found=tuple(output.shape), rows=rows)
