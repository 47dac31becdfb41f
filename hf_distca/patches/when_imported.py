"""Call a function as soon as a module has been imported, without importing it."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


def when_imported(name: str, call: Callable[[], None]) -> None:
    """Call `call` right after a module's import; call it now if the module has been imported."""
    if name in sys.modules:
        call()
    else:
        sys.meta_path.insert(0, _Finder(name, call))


class _Finder(MetaPathFinder):
    """Find one module, once, through the other finders, and add the call to its import."""

    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self._name = name
        self._call = call

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the awaited module, and None for every other module."""
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            members = vars(spec.loader)
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                del members["exec_module"]
                execute(module)
                self._call()

            members["exec_module"] = exec_module
        return spec
