"""Guard of a count on fake tensors: it launches no kernel, and counts Liger's kernels.

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
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from hf_distca.models.decoder import base_model

_ONE_COUNT = threading.RLock()
"""Lock by which counts of several threads do not undo each other's guards."""


@contextmanager
def without_launches() -> Iterator[None]:
    """Make launches of Triton kernels by this thread do nothing; other threads launch as before."""
    with _ONE_COUNT, ExitStack() as guards:
        counting = threading.get_ident()
        for launcher in _launchers():
            guards.enter_context(
                patch.object(launcher, "run", _skipped_in(counting, vars(launcher)["run"]))
            )
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


def _skipped_in(thread: int, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a launcher's `run` that does nothing in a thread."""

    def skipping(*args: Any, **kwargs: Any) -> Any:
        return None if threading.get_ident() == thread else run(*args, **kwargs)

    return skipping


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
    with ExitStack() as changes:
        for file in files:
            changes.enter_context(patch.dict(vars(file)))
        # Imported late: it imports peft and the trainer's arguments, which take seconds.
        from transformers.integrations.liger import apply_liger_kernel

        apply_liger_kernel(model, dict(config))
        yield


def raised_in(error: BaseException) -> str:
    """Return the function in which a count ended.

    It is the last one outside of torch, such as a package's kernel.
    """
    torch_folder = str(Path(torch.__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    last = next(frame for frame in reversed(frames) if not frame.filename.startswith(torch_folder))
    return f"{last.name} of {'/'.join(Path(last.filename).parts[-3:])}"
