"""All files below a KV cache's directory, whichever model and engine they are of: sizes, ages, and what has to go."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ABOUT = "about"
"""File in a model's folder that says whose KV it is, for people."""
DRAFT_PREFIX = ".draft-"
"""Begins the name of a file that is being written."""
DRAFT_S = 600.0
"""A draft that has not changed for so long was left by a process that was killed."""
LEAVE = 0.9
"""Share of the quota that is left when it was exceeded."""


class Held(NamedTuple):
    """A file, its size, and when it was last used."""

    path: str
    num_bytes: int
    used_s: float


def held_files(root: Path) -> Iterator[Held]:
    """All files of runs below `root`; those that vanish meanwhile are left out."""
    for folder, _, names in os.walk(root):
        if Path(folder) == root:
            continue
        for name in names:
            if name == ABOUT:
                continue
            with suppress(OSError):
                status = os.lstat(path := os.path.join(folder, name))
                yield Held(path, status.st_size, status.st_mtime)


def remove_file(path: str) -> bool:
    """Whether it is gone by this call; another engine may have been first."""
    with suppress(OSError):
        os.unlink(path)
        return True
    return False


def sweep(root: Path, quota_bytes: int, now_s: float) -> tuple[int, set[str]]:
    """Remove what was not used for longest until the quota has room again, and drafts that nobody writes any more.

    Returns the bytes that are left and the paths that are gone. A time in the future, of a clock that was set back, is
    as now.
    """
    files, gone = [], set[str]()
    for held in held_files(root):
        is_draft = os.path.basename(held.path).startswith(DRAFT_PREFIX)
        if is_draft and abs(now_s - held.used_s) > DRAFT_S:
            remove_file(held.path)
        elif not is_draft:
            files.append(held._replace(used_s=min(held.used_s, now_s)))
    left = sum(held.num_bytes for held in files)
    if left > quota_bytes:
        for held in sorted(files, key=lambda held: held.used_s):
            if left <= LEAVE * quota_bytes:
                break
            remove_file(held.path)  # if another engine was first, it is gone as well
            gone.add(held.path)
            left -= held.num_bytes
    return left, gone
