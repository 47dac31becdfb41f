"""What all changed modules share.

They have a subclass with the name of their class, and methods that are not traced. A pickled module
has its own class again: who loads it gets the model as it was before hf_distca changed it.

Core attention of a planned step changes with every plan. If torch.compile traced it, each
micro-batch would compile it again, in dozens of parts. Each call is therefore one break between
compiled graphs. Projections and position embedding are before the break; output projection, norms
and MLP follow it.

A layer whose nano-batches take turns is not traced as a whole. The modules inside may be compiled,
attention included: they pause only inside core attention, where nothing is traced. The compiler's
per-thread state is therefore the same in both nano-batches.
"""

from collections.abc import Callable
from contextvars import ContextVar
from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import nn

from hf_distca.dispatch.bound import BoundPlan
from hf_distca.plan import PLAN_KEY

Function = TypeVar("Function", bound=Callable[..., Any])
BATCHES = "batches"
"""Attribute of a backbone with the process groups of its padded batches."""


def uncompiled(reason: str, *, recursive: bool = True) -> Callable[[Function], Function]:
    """Decorate a function that compiled code calls without tracing it.

    TORCH_LOGS=graph_breaks shows the reason.

    Args:
        recursive: whether what the function calls is not traced either.
    """
    decorator: Callable[[Function], Function] = torch.compiler.disable(
        recursive=recursive, reason=reason
    )
    return decorator


running_plan: ContextVar[BoundPlan | None] = ContextVar(
    "plan of the module whose forward runs", default=None
)
"""Plan for what a module's forward calls without keywords; None outside of a planned step."""


class KnowsPlan(nn.Module):
    """Base that precedes the class of a module whose forward makes its plan known."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the module's own class, with its plan known if it has one."""
        plan = kwargs.get(PLAN_KEY)
        if not isinstance(plan, BoundPlan):
            return super().forward(*args, **kwargs)
        return self._planned_forward(plan, args, kwargs)

    # Only this function stays uncompiled, and what it calls may be compiled.
    @uncompiled("a plan is made known to other modules", recursive=False)
    def _planned_forward(
        self, plan: BoundPlan, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        token = running_plan.set(plan)
        try:
            return super().forward(*args, **kwargs)
        finally:
            running_plan.reset(token)


class _Changed(nn.Module):
    """Base of all subclasses that replace a module's own class."""

    own_class: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the module with its own class, and without process groups."""
        # Later protocols insist on the class that the module has now.
        reduced: Any = super().__reduce_ex__(1)
        make, (_, *others), state = reduced
        kept = {name: value for name, value in state.items() if name != BATCHES}
        return make, (self.own_class, *others), kept

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Changed":
        """Copy the module with its changes; without this method a copy would be pickled."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        batches = vars(self).get(BATCHES)
        memo[id(batches)] = batches  # process groups are not copied
        vars(copied).update(deepcopy(vars(self), memo))
        return copied


def subclass(cls: type[nn.Module], *mixins: type, **members: Any) -> type[nn.Module]:
    """Return a subclass with its base's name.

    PEFT, accelerate and checkpoints find modules by this name.
    """
    own_class = getattr(cls, "own_class", cls)
    bases = (*mixins, cls) if issubclass(cls, _Changed) else (*mixins, _Changed, cls)
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, bases, {**names, "own_class": own_class, **members})
