"""Importing torch is the slowest second of a start; a fifth of it is put off until somebody needs it.

torch._meta_registrations says what operations do to tensors without memory, for tracing, and brings the decompositions
of most operations along. A worker whose models are native never needs it; transformers does, and whatever traces.
Modules of torch count on it: torch._dynamo, which torch.profiler and torch.compile load, cannot even be imported
without. So it runs before anything is imported that `import torch` did not bring, and all of that finds torch as it
always is. Only who computes on the "meta" device, or makes a Generator, without importing anything has to call
`complete`.

What torch.cuda would load of CUDA's bindings, where they are installed, is left out altogether: a twelfth more, for a
process that uses no GPU.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

PUT_OFF = "torch._meta_registrations"
NEEDS_IT = "transformers"
LEFT_OUT = "cuda.bindings"
"""torch.cuda does without if it cannot be imported; once torch is there, those who want it find it."""


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


class _Loaded(Loader):
    """For a module that was imported while its own import was looking for it: it must not run twice."""

    def __init__(self, spec: ModuleSpec | None) -> None:
        self.spec = spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


class _PutOff(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == LEFT_OUT and _is_being_imported("torch"):
            raise ModuleNotFoundError(f"{name} is left out: this process uses no GPU", name=name)
        if name == NEEDS_IT or (name.startswith("torch.") and not _is_being_imported("torch")):
            complete()
            if name in sys.modules:
                module = sys.modules[name]
                module.__spec__ = spec_from_loader(name, _Loaded(module.__spec__))  # importlib prefers it to an answer
                return module.__spec__
        if name != PUT_OFF:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _LoadLater(spec.loader)
        return spec


def put_off() -> None:
    """To be called before torch is imported, by a process that uses no GPU; later it does nothing."""
    if "torch" not in sys.modules and not any(isinstance(finder, _PutOff) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PutOff())


def complete() -> None:
    """Run what was put off: to be called before anything is computed on the "meta" device, or traced, and before a
    torch.Generator is made."""
    module = sys.modules.get(PUT_OFF)
    if isinstance(module, _Later):
        _run(module)


def _is_being_imported(name: str) -> bool:
    """False also where Python does not tell: then nothing stays put off for longer than that import."""
    return getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False)


def _run(module: ModuleType) -> None:
    spec = module.__spec__
    if spec is not None and isinstance(spec.loader, _LoadLater):
        module.__class__ = ModuleType
        spec.loader = spec.loader.loader
        spec.loader.exec_module(module)
