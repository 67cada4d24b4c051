"""Importing torch is the slowest second of a start; a fifth of it is put off until somebody needs it.

torch._meta_registrations says what operations do to tensors without memory, for tracing, and brings the decompositions
of most operations along. A worker whose models are native never needs it; transformers does.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

PUT_OFF = "torch._meta_registrations"
NEEDS_IT = "transformers"


class _Later(ModuleType):
    """A module that runs when something is wanted of it. What all modules have is no such thing: inspect looks at the
    files of all of them."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _run(self)
        return getattr(self, name)


class _LoadLater(Loader):
    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Later(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing yet."""


class _PutOff(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == NEEDS_IT:
            complete()
        if name != PUT_OFF:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _LoadLater(spec.loader)
        return spec


def put_off() -> None:
    """To be called before torch is imported; later it does nothing."""
    if "torch" not in sys.modules and not any(isinstance(finder, _PutOff) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PutOff())


def complete() -> None:
    """Run what was put off: to be called before anything is computed on the "meta" device, or traced."""
    module = sys.modules.get(PUT_OFF)
    if isinstance(module, _Later):
        _run(module)


def _run(module: ModuleType) -> None:
    spec = module.__spec__
    if spec is not None and isinstance(spec.loader, _LoadLater):
        module.__class__ = ModuleType
        spec.loader = spec.loader.loader
        spec.loader.exec_module(module)
