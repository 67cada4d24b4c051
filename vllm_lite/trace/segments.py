"""Segments: the files of one trace. The first engine of a launch writes FILE; the engine that replaces it as the n-th
life writes FILE.n. Each segment has all inputs of its own scheduler and begins with the requests that clients sent
again.

A life that died before it served wrote no file, so numbers may be missing, and a file of an earlier launch may be left
over. So the segments of FILE are the files next to it whose headers have the same launch, in the order of their lives.
"""

import os
from contextlib import suppress

from vllm_lite.errors import ProtocolError
from vllm_lite.trace.reader import TraceReader
from vllm_lite.trace.records import Header


def segment_path(path: str, life: int) -> str:
    """Path of the trace that the engine of this life writes with `--record path`."""
    return path if life <= 1 else f"{path}.{life}"


def segment_paths(path: str) -> list[str]:
    """`path`, and the later segments of the same trace. Raises ProtocolError if the file at `path` is not a trace."""
    first = header_of(path)
    if not first.launch:  # no other process would have replaced this engine
        return [path]
    folder, name = os.path.split(path)
    with os.scandir(folder or ".") as entries:
        endings = [entry.name.removeprefix(f"{name}.") for entry in entries if entry.name.startswith(f"{name}.")]
    found = [path]
    for life in sorted(int(ending) for ending in endings if ending.isascii() and ending.isdecimal()):
        with suppress(ProtocolError):  # of an older version, or empty because its engine died
            header = header_of(segment_path(path, life))
            if (header.launch, header.life) == (first.launch, life) and life > first.life:
                found.append(segment_path(path, life))
    return found


def header_of(path: str) -> Header:
    """Header of the trace at `path`. Raises ProtocolError if it is not a trace."""
    reader = TraceReader(path)
    reader.close()
    return reader.header
