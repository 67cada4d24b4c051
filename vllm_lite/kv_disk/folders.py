"""RankFolders: the folders of one rank of one model in a KV cache's directory. They are created private, only in the
directory that was opened, and never through a link.

Somebody may remove or replace the directory while engines run, or unmount its file system. Then nothing is written: a
newly created store would have no seed, and might be open to others.
"""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from vllm_lite.kv_disk.usage import ABOUT, is_part

MODEL_DIGITS = 32


class RankFolders:
    """The folders of one rank: `path` has the parts, which have the files."""

    def __init__(self, root: Path, fingerprint: bytes, place: tuple[int, int], about: str = "") -> None:
        """`place` is (rank, world size); `about` describes the model to people."""
        self.root = root
        self.path = root / fingerprint.hex()[:MODEL_DIGITS].ljust(MODEL_DIGITS, "0") / f"{place[0]}-{place[1]}"
        self._about = about
        self._identity = _identity(root)

    def parts(self) -> list[str]:
        """Sorted names of the parts; none if the directory is missing. Raises OSError if it cannot be listed."""
        with suppress(FileNotFoundError, NotADirectoryError):
            return sorted(name for name in os.listdir(self.path) if is_part(name))
        return []

    def part(self, name: str) -> str:
        """Path of the part that the file `name` belongs to."""
        return os.path.join(self.path, name[:2])

    def make(self, name: str = "") -> None:
        """Create the missing folders for the file `name`, or for the parts. Raises OSError if that fails, or if the
        directory is no longer the one that was opened."""
        if _identity(self.root) != self._identity:
            raise OSError(errno.ESTALE, "the directory was replaced by another one")
        model = self.path.parent
        if _make(str(model)) or not os.path.lexists(model / ABOUT):
            with suppress(OSError):
                (model / ABOUT).write_text(self._about, encoding="utf-8")
        _make(str(self.path))
        if name:
            _make(self.part(name))


def _identity(folder: Path) -> tuple[int, int]:
    """Device and inode number of a folder. Raises OSError."""
    status = os.lstat(folder)
    return status.st_dev, status.st_ino


def _make(folder: str) -> bool:
    """Create a folder. Returns whether it was missing. Raises OSError if the path is not a folder, or is a link to
    one."""
    with suppress(FileExistsError):
        os.mkdir(folder, 0o700)
        return True
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "it is a link or a file, where a folder of ours should be", folder)
    return False
