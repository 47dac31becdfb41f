"""Modules that mix a document's rows without attention.

These are state spaces, linear attention and convolutions.

Each output row depends on earlier rows of the call, across documents. `plan_mixing` gives such a
module a subclass for planned steps. A module of the table in `models.mixing_modules` runs once on
all rows, with other functions in place of its convolution and its recurrence
(`patches.mixing_functions`); its documents may be cut. Any other module runs document by document,
which is exact for every model and needs whole documents on a rank.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import CellType, FunctionType
from typing import Any

from torch import nn
from transformers import Cache

from hf_distca.checks.model_rules import Models
from hf_distca.checks.run_rules import STOCK_TRAINER
from hf_distca.checks.step_rules import PlannedStep
from hf_distca.dispatch.bound import BoundPlan
from hf_distca.dispatch.kept_results import Checkpoints, checkpoints_around
from hf_distca.models.decoder import mixing_modules, stock_forward
from hf_distca.models.mixing_modules import LIGHTNING, functions
from hf_distca.patches.mixing_calls import MixingCall
from hf_distca.patches.mixing_functions import lightning_attention, planned_functions
from hf_distca.patches.modules import subclass, uncompiled
from hf_distca.patches.split import Parts, Sizes, join_results, split_argument
from hf_distca.plan import PLAN_KEY

REPLACED_BY_PLAN = (
    PLAN_KEY,
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
)
"""Arguments that describe documents in a row, as the plan does."""
DOCUMENTS: Parts = ("the mixing module", STOCK_TRAINER)

_running: ContextVar[tuple[BoundPlan, Checkpoints] | None] = ContextVar(
    "decoder layer that runs", default=None
)
"""Plan of the running layer, and the activation checkpoints around the layer."""


@contextmanager
def layer_runs(plan: BoundPlan) -> Iterator[None]:
    """Make a plan known to the modules of a running decoder layer.

    Models pass it to some modules only.
    """
    token = _running.set((plan, checkpoints_around()))
    try:
        yield
    finally:
        _running.reset(token)


def plan_mixing(layer: nn.Module) -> int:
    """Let a layer's mixing modules keep documents apart, and return their number.

    The modules keep documents apart inside `layer_runs`.
    """
    modules = mixing_modules(layer)
    for module in modules:
        if isinstance(module, _MixingModule):
            continue
        names = functions(module)
        run = None
        if names is not None and LIGHTNING in names:
            run = lightning_attention
        elif names is not None:
            forward = stock_forward(module)
            run = _seeing(forward, planned_functions(inspect.unwrap(forward).__globals__))
        module.__class__ = subclass(type(module), _MixingModule, names=names, run=run)
    return len(modules)


class _MixingModule(nn.Module):
    """Base that precedes a mixing module's own class."""

    names: (
        tuple[str, ...] | None
    )  # functions in which rows depend on each other; None if they are not known
    run: Callable[
        ..., Any
    ]  # forward of the module's class that calls functions for planned steps in their place

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        running = _running.get()
        if running is None:
            return super().forward(*args, **kwargs)
        return self._planned_forward(super().forward, *running, *args, **kwargs)

    @uncompiled("documents have lengths that are new with each micro-batch")
    def _planned_forward(
        self,
        stock: Callable[..., Any],
        plan: BoundPlan,
        around_layer: Checkpoints,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if checkpoints_around() != around_layer:
            raise Models.CHECKPOINT_INSIDE.error(module=type(self).__name__)
        plan.ran.mixing += 1
        kwargs = {name: value for name, value in kwargs.items() if name not in REPLACED_BY_PLAN}
        if self.names is None:
            return _by_document(stock, plan.document_rows, args, kwargs)
        if any(isinstance(value, Cache) for value in (*args, *kwargs.values())):
            raise PlannedStep.CACHE.error_here()
        call = MixingCall(self, plan)
        result = call.run(self.run, args, kwargs)
        if tuple(call.mixed) != self.names:
            raise PlannedStep.OTHER_MIXING.error_here(
                module=type(self).__name__, found=call.mixed, known=list(self.names)
            )
        return result


def _seeing(function: Callable[..., Any], names: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a copy of a function that finds other values under some global names.

    Its decorators are copied, too.
    """
    assert isinstance(function, FunctionType)
    closure = function.__closure__
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        namespace = {**function.__globals__, **names}
    else:
        namespace = function.__globals__
        copied = CellType(_seeing(inner, names))
        closure = tuple(copied if cell.cell_contents is inner else cell for cell in closure or ())
    copy = FunctionType(
        function.__code__, namespace, function.__name__, function.__defaults__, closure
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _by_document(
    stock: Callable[..., Any], sizes: Sizes, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a module on one document after another, and join the results."""
    split_args = [
        split_argument(f"argument {i}", value, sizes, DOCUMENTS) for i, value in enumerate(args)
    ]
    split_kwargs = {
        name: split_argument(name, value, sizes, DOCUMENTS) for name, value in kwargs.items()
    }
    results = []
    for i in range(len(sizes)):
        document_args = [parts[i] for parts in split_args]
        document_kwargs = {name: parts[i] for name, parts in split_kwargs.items()}
        results.append(stock(*document_args, **document_kwargs))
    if not isinstance(results[0], tuple):
        return join_results("output", tuple(results), sizes, DOCUMENTS)
    rows, *further_results = zip(*results, strict=True)
    outputs = [join_results("output", rows, sizes, DOCUMENTS)]
    for values in further_results:
        try:
            outputs.append(join_results("output", values, sizes, DOCUMENTS))
        except ValueError:  # not rows, but a result per document such as a last state
            outputs.append(values)
    return tuple(outputs)
