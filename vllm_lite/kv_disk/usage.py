"""All files in a KV cache's directory, of any model and engine: sizes, ages, and eviction.

The directory may contain other things, which must not be lost: a file counts, and may be removed, only at a path that
a store uses, and links are not followed.

    DIR/<32 hex digits>/<rank>-<world>/<2 hex digits>/<40 hex digits>, or a draft's name in place of the last
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ABOUT = "about"
"""File in a model's folder that describes the model to people."""
DRAFT_PREFIX = ".draft-"
"""Prefix of the name of a file that is being written."""
DRAFT_S = 600.0
"""Age in seconds of a draft that was left by a killed process."""
LEAVE = 0.9
"""Share of the quota to which an eviction reduces the files."""
_MODEL, _RANK, _PART = re.compile("[0-9a-f]{32}"), re.compile("[0-9]+-[0-9]+"), re.compile("[0-9a-f]{2}")
_FILE, _DRAFT = re.compile("[0-9a-f]{40}"), re.compile(r"\.draft-[0-9]+-[0-9]+-[0-9]+")


class Held(NamedTuple):
    """A file, its size, and the time of its last use."""

    path: str
    num_bytes: int
    used_s: float

    @property
    def is_draft(self) -> bool:
        return os.path.basename(self.path).startswith(DRAFT_PREFIX)


def is_part(name: str) -> bool:
    """Whether a folder name is that of a part."""
    return _PART.fullmatch(name) is not None


def is_file_name(name: str) -> bool:
    """Whether a name is that of a complete file."""
    return _FILE.fullmatch(name) is not None


def models_in(root: Path) -> list[Path]:
    """Folders of models, sorted."""
    return [Path(path) for path in _folders(root, _MODEL)]


def ranks_in(model: Path) -> list[Path]:
    """Folders of a model's ranks, sorted."""
    return [Path(path) for path in _folders(model, _RANK)]


def held_by_rank(rank: Path) -> Iterator[Held]:
    """Files of a rank, including drafts; those that vanish meanwhile are left out."""
    for part in _folders(rank, _PART):
        for entry in _entries(part):
            if not (_FILE.fullmatch(entry.name) or _DRAFT.fullmatch(entry.name)):
                continue
            with suppress(OSError):
                if not entry.is_dir(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    yield Held(entry.path, status.st_size, status.st_mtime)


def held_files(root: Path) -> Iterator[Held]:
    """Files of all models below `root`, including drafts; those that vanish meanwhile are left out."""
    for model in models_in(root):
        for rank in ranks_in(model):
            yield from held_by_rank(rank)


def remove_model(model: Path) -> None:
    """Remove a model's files, and its folders if they are then empty. Other files are kept, as are files that engines
    write meanwhile."""
    for rank in ranks_in(model):
        for held in held_by_rank(rank):
            remove_file(held.path)
        for part in _folders(rank, _PART):
            _remove_folder(part)
        _remove_folder(str(rank))
    remove_file(str(model / ABOUT))
    _remove_folder(str(model))


def remove_file(path: str) -> bool:
    """Remove a file. Returns whether this call removed it; another engine may have done so before."""
    with suppress(OSError):
        os.unlink(path)
        return True
    return False


def sweep(root: Path, quota_bytes: int, now_s: float) -> tuple[int, set[str]]:
    """Remove the least recently used files until the quota has room again, and abandoned drafts.

    Returns the remaining bytes and the removed paths. A time of use in the future, after a clock was set back, counts
    as now.
    """
    files, gone = [], set[str]()
    for held in held_files(root):
        if not held.is_draft:
            files.append(held._replace(used_s=min(held.used_s, now_s)))
        elif abs(now_s - held.used_s) > DRAFT_S:
            remove_file(held.path)
    left = sum(held.num_bytes for held in files)
    if left > quota_bytes:
        for held in sorted(files, key=lambda held: held.used_s):
            if left <= LEAVE * quota_bytes:
                break
            remove_file(held.path)  # removed in any case, perhaps by another engine
            gone.add(held.path)
            left -= held.num_bytes
    return left, gone


def _folders(parent: str | Path, names: re.Pattern[str]) -> list[str]:
    """Sorted folders, not links, whose names match; none if the parent cannot be listed."""
    found = list[str]()
    for entry in _entries(parent):
        with suppress(OSError):
            if names.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                found.append(entry.path)
    return sorted(found)


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    with suppress(OSError), os.scandir(folder) as entries:
        return list(entries)
    return []


def _remove_folder(path: str) -> None:
    with suppress(OSError):  # not empty
        os.rmdir(path)
