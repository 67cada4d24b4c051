"""Writes a GGUF file with all blocks as floats: a dense model that engines quantize again.

    python -m runners.dense_gguf FILE.gguf DENSE.gguf [--off-grid]

`--off-grid`: each weight moves by a random part of half a step of its grid. Weights on the grid of a 4-bit file would
be reproduced without error by any engine that uses the same groups, which would say nothing about the quality of its
rounding.
"""

import argparse
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, GGUFValueType, GGUFWriter, ReaderTensor
from gguf.quants import dequantize

from vllm_lite.kernels.gguf_blocks import BlockRows, take_apart

SEED = 47


def write_dense(source: Path, target: Path, *, off_grid: bool) -> None:
    """Write all tensors of `source` as float32, with its metadata."""
    tensors, architecture, metadata = _parsed(source)
    writer = GGUFWriter(target, architecture)
    for entry in metadata:
        writer.add_key_value(*entry)
    generator = torch.Generator().manual_seed(SEED)
    for tensor in tensors:
        writer.add_tensor(tensor.name, _floats(tensor, generator if off_grid else None).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@lru_cache(1)  # a vocabulary takes seconds, and a file is written in two forms
def _parsed(source: Path) -> tuple[list[ReaderTensor], str, list[tuple[str, Any, GGUFValueType, GGUFValueType | None]]]:
    """Parse a file: its tensors, its architecture, and its other metadata as arguments of add_key_value."""
    reader = GGUFReader(source)
    metadata = [
        (name, field.contents(), field.types[0], field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None)
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type")
    ]
    return reader.tensors, reader.fields["general.architecture"].contents(), metadata


def _floats(tensor: ReaderTensor, generator: torch.Generator | None) -> torch.Tensor:
    """float32, moved off its grid if there is a `generator`."""
    dense = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
    if generator is None or tensor.tensor_type.name in ("F32", "F16", "BF16"):
        return dense
    parts = take_apart(BlockRows(tensor.tensor_type.name, torch.from_numpy(tensor.data.copy())))
    step = parts.scales.repeat_interleave(parts.group_size, dim=1)[:, : dense.shape[1]]
    return dense + step * (torch.rand(dense.shape, generator=generator) - 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--off-grid", action="store_true")
    args = parser.parse_args()
    write_dense(args.source, args.target, off_grid=args.off_grid)


if __name__ == "__main__":
    main()
