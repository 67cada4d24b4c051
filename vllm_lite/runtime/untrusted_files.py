"""Files that a stranger may have written: reads that neither block nor exhaust memory, and a check of owners.

A checkpoint, adapter or cache folder may hold a pipe in place of a config, a link to an endless device, or a sparse
file of a terabyte.
"""

import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path

MAX_CONFIG_BYTES = 32 * 1024 * 1024
"""Size limit of a JSON config; the largest real ones, which list each expert, have 2 MB."""
MAX_TOKENIZER_BYTES = 256 * 1024 * 1024
_LFS = b"version https://git-lfs.github.com/spec/"


def is_lfs_pointer(head: bytes) -> bool:
    """Whether a file that begins with `head` is what `git clone` leaves of a large file without Git LFS."""
    return head.startswith(_LFS)


LFS_POINTER = "is the pointer of Git LFS to a file that was not fetched; run `git lfs pull` in its folder"


def read_bounded(path: str | Path, max_bytes: int = MAX_CONFIG_BYTES) -> bytes:
    """Read the regular file `path` of at most `max_bytes` bytes.

    Raises OSError, with a clear strerror, also for a larger file and for a pipe or device, without blocking on it.
    Raises ValueError for an invalid path.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # O_NONBLOCK: opening a pipe would block
    with open(descriptor, "rb", buffering=0) as file:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))
        if status.st_size <= max_bytes and len(data := file.read(max_bytes + 1)) <= max_bytes:
            return data
    raise OSError(errno.EFBIG, f"it has more than the {max_bytes} bytes that are read of such a file", str(path))


def first_untrusted(paths: Iterable[Path]) -> Path | None:
    """Find the first of `paths` that a third user may have changed: its owner is neither root nor this user, or it is a
    folder that all users may write. Raises OSError for a path that cannot be read."""
    for path in paths:
        status = path.stat()
        is_open = stat.S_ISDIR(status.st_mode) and status.st_mode & 0o002  # files are in these folders, with the umask
        if status.st_uid not in (0, os.geteuid()) or is_open:
            return path
    return None
