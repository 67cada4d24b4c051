"""The folders of one rank of one model below a KV cache's directory: made private, below the directory that was opened
and no other, and never through a link.

Somebody may remove the directory while engines run, put another one in its place, or take away the file system that is
mounted on it. Nothing is written there then: what a store made anew would have no seed, and could be open to others.
"""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from vllm_lite.kv_disk.usage import ABOUT, is_part

MODEL_DIGITS = 32


class RankFolders:
    """`path` has the parts that files lie in."""

    def __init__(self, root: Path, fingerprint: bytes, place: tuple[int, int], about: str = "") -> None:
        """`place` is the rank and how many there are; `about` says to people whose KV it is."""
        self.root = root
        self.path = root / fingerprint.hex()[:MODEL_DIGITS].ljust(MODEL_DIGITS, "0") / f"{place[0]}-{place[1]}"
        self._about = about
        self._identity = _identity(root)

    def parts(self) -> list[str]:
        """Names of the folders that have files, in order; none where there is no directory. Raises OSError if it cannot
        be listed."""
        with suppress(FileNotFoundError, NotADirectoryError):
            return sorted(name for name in os.listdir(self.path) if is_part(name))
        return []

    def part(self, name: str) -> str:
        """The folder that the file `name` belongs into."""
        return os.path.join(self.path, name[:2])

    def make(self, name: str = "") -> None:
        """Make what is missing of the way to the file `name`, or to the parts. Raises OSError if that cannot be, or if
        the directory is not the one that was opened."""
        if _identity(self.root) != self._identity:
            raise OSError(errno.ESTALE, "the directory was replaced by another one")
        model = self.path.parent
        if _make(str(model)) or not os.path.lexists(model / ABOUT):
            with suppress(OSError):
                (model / ABOUT).write_text(self._about)
        _make(str(self.path))
        if name:
            _make(self.part(name))


def _identity(folder: Path) -> tuple[int, int]:
    """Device and number of a folder. Raises OSError."""
    status = os.lstat(folder)
    return status.st_dev, status.st_ino


def _make(folder: str) -> bool:
    """Make a folder of ours. Whether it was missing. Raises OSError for what is no folder, also for a link to one."""
    with suppress(FileExistsError):
        os.mkdir(folder, 0o700)
        return True
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "it is a link or a file, where a folder of ours should be", folder)
    return False
