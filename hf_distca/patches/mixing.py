"""Modules that mix a document's rows without attention: state spaces, linear attention, convolutions.

Each output row depends on earlier rows of the call, across documents. In a planned step such a module runs document by
document: `plan_mixing` gives it a subclass whose forward splits its arguments by document. That is exact for every
model and kernel, and needs whole documents on a rank. With many short documents it launches more kernels than a module
that takes packed lengths (cu_seq_lens_q, seq_idx).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

from hf_distca.dispatch.bound import BoundPlan
from hf_distca.dispatch.checkpoints import Checkpoints, checkpoints_around
from hf_distca.models.decoder import mixing_modules
from hf_distca.models.refusals import Models
from hf_distca.patches.modules import subclass, uncompiled
from hf_distca.patches.split import Refusal, Sizes, join_results, split_argument
from hf_distca.plan import PLAN_KEY

REPLACED_BY_PLAN = (PLAN_KEY, "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Arguments that describe documents in a row; a module that gets one document at a time needs none."""
DOCUMENTS = Refusal(
    "a planned step runs a mixing module document by document, but cannot divide its {name} ({described}) into the "
    "documents of its {rows} rows; this model cannot train with planned attention",
    "a planned step runs a mixing module document by document, but cannot join its {name} of documents of {sizes} "
    "rows: got {described}; this model cannot train with planned attention",
)

_running: ContextVar[tuple[BoundPlan, Checkpoints] | None] = ContextVar("decoder layer that runs", default=None)
"""Plan of the running layer, and the checkpoints around the layer."""


@contextmanager
def layer_runs(plan: BoundPlan) -> Iterator[None]:
    """Make a plan known to the modules of a running decoder layer; models pass it to some modules only."""
    token = _running.set((plan, checkpoints_around()))
    try:
        yield
    finally:
        _running.reset(token)


def plan_mixing(layer: nn.Module) -> int:
    """Let a layer's mixing modules run document by document inside `layer_runs`, and return their number."""
    modules = mixing_modules(layer)
    for module in modules:
        if not isinstance(module, _MixingModule):
            module.__class__ = subclass(type(module), _MixingModule)
    return len(modules)


class _MixingModule(nn.Module):
    """Base that precedes a mixing module's own class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        running = _running.get()
        if running is None:
            return super().forward(*args, **kwargs)
        return self._by_document(super().forward, *running, args, kwargs)

    @uncompiled("a mixing module runs on one document after another, of lengths that are new with each micro-batch")
    def _by_document(
        self,
        run: Callable[..., Any],
        plan: BoundPlan,
        around_layer: Checkpoints,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if checkpoints_around() != around_layer:
            raise Models.CHECKPOINT_INSIDE.error(module=type(self).__name__)
        plan.ran.mixing += 1
        sizes = plan.document_rows
        split_args = [split_argument(f"argument {i}", value, sizes, DOCUMENTS) for i, value in enumerate(args)]
        split_kwargs = {
            name: split_argument(name, value, sizes, DOCUMENTS)
            for name, value in kwargs.items()
            if name not in REPLACED_BY_PLAN
        }
        results = [
            run(*(parts[i] for parts in split_args), **{name: parts[i] for name, parts in split_kwargs.items()})
            for i in range(len(sizes))
        ]
        if isinstance(results[0], tuple):
            rows, *others = zip(*results, strict=True)
            return join_results("output", rows, sizes, DOCUMENTS), *(_joined(each, sizes) for each in others)
        return join_results("output", tuple(results), sizes, DOCUMENTS)


def _joined(results: tuple[Any, ...], sizes: Sizes) -> Any:
    """Join further rows that a module returns; return results per document, such as last states, as they are."""
    try:
        return join_results("output", results, sizes, DOCUMENTS)
    except ValueError:
        return results
