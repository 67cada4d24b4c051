"""Kernels in use: a description for people of the kernels that compute a loaded model. It inspects the model's objects,
so that no layer has to describe itself."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from vllm_lite.attention.backend import AttentionBackend
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.weights.linear import PackedWeight
from vllm_lite.layers.weights.matmul import DenseMatmul, Int8Matmul, OneDnnMatmul

WIDTHS = {"INT4": "4 bits", "E2M1": "4-bit floats", "INT8": "8 bits", "E4M3": "8-bit floats"}
"""Code of packed weights on a GPU -> its description."""


def kernels_in_use(
    model: object, backend: AttentionBackend, device: torch.device, graph_sizes: Iterable[int]
) -> dict[str, str]:
    """Part of the model -> its kernels. `graph_sizes`: rows of the decode steps with graphs."""
    most = max(graph_sizes, default=0)
    steps = f"decode steps of up to {most} tokens are recorded and repeated" if most else "every step is built anew"
    return {**_machine(device), "attention": backend.layout_name, "matrices": _matrices(model), "steps": steps}


def _machine(device: torch.device) -> dict[str, str]:
    if device.type == "cuda":
        return {"kernels": "CUDA", "GPU": torch.cuda.get_device_name(device)}
    if not cpu.available():
        return {"kernels": "plain torch, as none are compiled"}
    return {"kernels": "native", "instruction set": cpu.isa(), "threads": str(cpu.num_threads())}


def _matrices(model: object) -> str:
    """Weight forms in memory with the number of matrices in each, the most frequent first."""
    counts = Counter(form for each in _parts(model) if (form := _form(each)) is not None)
    return ", ".join(f"{count} x {form}" for form, count in counts.most_common())


def _form(part: object) -> str | None:
    if isinstance(part, PackedWeight):
        return part.form
    if isinstance(part, DenseMatmul):
        return f"{_name(part.weight.dtype)}, by torch"
    if isinstance(part, Int8Matmul):
        return "8 bits, widened by torch"
    if isinstance(part, OneDnnMatmul):
        return f"{_name(part.packed.dtype)}, by oneDNN"
    if isinstance(part, torch.nn.Linear):
        return f"{_name(part.weight.dtype)}, by transformers"
    return WIDTHS.get(getattr(part, "kind", "")) if type(part).__name__ == "PackedWeight" else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _parts(whole: object) -> Iterator[object]:
    """All objects of this package, and torch modules, that are reachable from `whole`, each once."""
    seen, left = set[int](), [whole]
    while left:
        part: Any = left.pop()
        if id(part) in seen or isinstance(part, str | bytes | torch.Tensor):
            continue
        seen.add(id(part))
        if isinstance(part, dict):
            left += part.values()
        elif isinstance(part, list | tuple):
            left += part
        if type(part).__module__.startswith("vllm_lite.") or isinstance(part, torch.nn.Module):
            yield part
            left += getattr(part, "__dict__", {}).values()
