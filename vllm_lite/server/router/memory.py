"""Memory of process trees; pages that processes share are divided among them (PSS)."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def tree_bytes(roots: Iterable[int]) -> dict[int, int]:
    """Map each process to the memory of itself and all its descendants; 0 if it has exited."""
    parents = _parents()
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found = {}
    for root in roots:
        tree, total = [root], 0
        while tree:
            pid = tree.pop()
            total += _own_bytes(pid)
            tree += children.get(pid, ())
        found[root] = total
    return found


def _parents() -> dict[int, int]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                found[int(entry.name)] = int(fields[1])
    return found


def _own_bytes(pid: int) -> int:
    """The proportional set size; the resident set size if the kernel does not report it."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
