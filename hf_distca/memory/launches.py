"""Guards of a count on fake tensors: it launches no kernel, and counts Liger's kernels.

A Triton kernel that gets fake tensors reads and writes addresses that do not exist, which destroys
the CUDA context of the process. Packages such as Liger and fla make a kernel's results by torch and
then launch the kernel on them. A launch that does nothing leaves those tensors, so that the count
sees the memory of the package's own code.

Kernels of CUDA extensions ask a tensor for its address. Tensors of `hf_distca.models.fake` raise an
error then.
"""

import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers.integrations import moe

from hf_distca.memory.stand_ins import grouped_products
from hf_distca.models.decoder import base_model

_ONE_COUNT = threading.RLock()
"""Lock by which counts of several threads do not undo each other's guards."""


@contextmanager
def without_launches() -> Iterator[None]:
    """Make this thread launch no Triton kernel, and give products of experts their stand-in.

    Other threads compute as before.
    """
    launchers = _launchers()
    with _ONE_COUNT, _restored([*launchers, moe]):
        for launcher in launchers:
            launcher.run = _in_this_thread(_launch_nothing, launcher.run)
        moe._grouped_mm = _in_this_thread(grouped_products, moe._grouped_mm)
        yield


def _launchers() -> list[type[Any]]:
    """Return Triton's classes that launch kernels.

    They launch functions, tuned functions, and what torch's compiler makes.
    """
    if importlib.util.find_spec("triton") is None:
        return []
    from triton.runtime import KernelInterface  # Triton's own subclasses come with it

    launchers: list[type[Any]] = [KernelInterface]
    for launcher in launchers:  # grows meanwhile, by subclasses of subclasses
        launchers += [
            subclass for subclass in launcher.__subclasses__() if subclass not in launchers
        ]
    return [launcher for launcher in launchers if "run" in vars(launcher)]


def _in_this_thread(
    stand_in: Callable[..., Any], function: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function that is a stand-in in this thread, and the given function in others."""
    counting = threading.get_ident()

    def chosen(*args: Any, **kwargs: Any) -> Any:
        called = stand_in if threading.get_ident() == counting else function
        return called(*args, **kwargs)

    return chosen


def _launch_nothing(*_: Any, **__: Any) -> None:
    pass


@contextmanager
def with_liger(model: nn.Module, config: Mapping[str, Any] | None) -> Iterator[None]:
    """Give a model Liger's kernels as transformers' trainer does; None leaves the model as it is.

    Liger also replaces functions of the model's file, such as the position embedding. They come
    back at the end.

    Args:
        model: a copy, which keeps the kernels of its modules.
        config: transformers' `liger_kernel_config`.
    """
    if config is None:
        yield
        return
    classes = type(base_model(model)).__mro__
    module_names = dict.fromkeys(cls.__module__ for cls in classes)
    files = [sys.modules[name] for name in module_names if "transformers" in name]
    with _restored(files):
        # Imported late: it imports peft and the trainer's arguments, which take seconds.
        from transformers.integrations.liger import apply_liger_kernel

        apply_liger_kernel(model, dict(config))
        yield


@contextmanager
def _restored(owners: Sequence[Any]) -> Iterator[None]:
    """Give classes or modules back at the end what they have at the beginning."""
    before = [dict(vars(owner)) for owner in owners]
    try:
        yield
    finally:
        for owner, attributes in zip(owners, before, strict=True):
            for name in [name for name in vars(owner) if name not in attributes]:
                delattr(owner, name)
            for name, value in attributes.items():
                if vars(owner).get(name) is not value:
                    setattr(owner, name, value)
