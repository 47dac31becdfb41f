"""What stays as it is where a model, or a part of one, is compiled by torch.compile.

Core attention of a planned step changes with every plan: traced, it would be compiled anew for each micro-batch, in
dozens of pieces. So each call of it is one break between compiled graphs: projections and position embedding before
it, output projection, norms and MLP after it. A layer whose nano-batches take turns is not traced as a whole, but the
modules inside it may be compiled, its attention module too: these pause inside core attention only, where nothing is
traced, so that what the compiler keeps per thread is the same in both.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(reason: str) -> Callable[[Function], Function]:
    """Decorates a function that compiled code is to call and not to trace.

    Args:
        reason: shown by TORCH_LOGS=graph_breaks.
    """
    decorator: Callable[[Function], Function] = torch.compiler.disable(reason=reason)
    return decorator
