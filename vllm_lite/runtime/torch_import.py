"""Faster import of torch, the slowest second of a start: a fifth of it is deferred until needed.

torch._meta_registrations defines operations on tensors without memory, for tracing, and imports the decompositions of
most operations. A worker with native models never needs it; transformers and tracing do. Modules of torch rely on it:
torch._dynamo, which torch.profiler and torch.compile import, cannot even be imported without. So it runs before the
first import of any module that `import torch` does not import itself. Only code that computes on the "meta" device or
makes a Generator, without importing anything, must call `complete`.

CUDA's bindings, which torch.cuda would import where they are installed, are skipped: they take another twelfth, and
this process uses no GPU.
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
"""torch.cuda works without it. After the import of torch, others can import it."""


class _Later(ModuleType):
    """A module that runs when an attribute is read, except attributes that every module has, such as `__file__`:
    inspect reads these of all modules."""

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
        """Deferred to the first access."""


class _Loaded(Loader):
    """Loader of a module that was imported during the search for it: it must not run twice."""

    def __init__(self, spec: ModuleSpec | None) -> None:
        self.spec = spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


class _PutOff(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == LEFT_OUT and _is_torch_being_imported():
            raise ModuleNotFoundError(f"{name} is left out: this process uses no GPU", name=name)
        if name == NEEDS_IT or (name.startswith("torch.") and not _is_torch_being_imported()):
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
    """Call it before torch is imported, in a process that uses no GPU; afterwards it does nothing."""
    if "torch" not in sys.modules and not any(isinstance(finder, _PutOff) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PutOff())


def complete() -> None:
    """Run the deferred module. Call it before computing on the "meta" device, tracing, or making a torch.Generator."""
    module = sys.modules.get(PUT_OFF)
    if isinstance(module, _Later):
        _run(module)


def _is_torch_being_imported() -> bool:
    """Whether torch is being imported; also False if Python does not say, and then nothing stays deferred after that
    import."""
    return getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False)


def _run(module: ModuleType) -> None:
    spec = module.__spec__
    if spec is not None and isinstance(spec.loader, _LoadLater):
        module.__class__ = ModuleType
        spec.loader = spec.loader.loader
        spec.loader.exec_module(module)
