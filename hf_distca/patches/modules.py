"""What all changed modules share.

They have a subclass with the name of their class, and methods that are not traced.

Core attention of a planned step changes with every plan. If torch.compile traced it, each
micro-batch would compile it again, in dozens of pieces. Each call is therefore one break between
compiled graphs. Projections and position embedding are before the break; output projection, norms
and MLP follow it.

A layer whose nano-batches take turns is not traced as a whole. The modules inside may be compiled,
attention included: they pause only inside core attention, where nothing is traced. The compiler's
per-thread state is therefore the same in both nano-batches.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

Function = TypeVar("Function", bound=Callable[..., Any])


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


def subclass(cls: type[nn.Module], *mixins: type, **members: Any) -> type[nn.Module]:
    """Return a subclass with its base's name.

    PEFT, accelerate and checkpoints find modules by this name.
    """
    return type(
        cls.__name__,
        (*mixins, cls),
        {"__module__": cls.__module__, "__qualname__": cls.__qualname__, **members},
    )
