"""Files that a stranger may have written: reads that neither wait nor fill the memory, and owners that may be trusted.

A checkpoint, an adapter or a cache folder may hold a pipe in a config's place, a link to a device that never ends, or a
sparse file of a terabyte.
"""

import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path

MAX_CONFIG_BYTES = 32 * 1024 * 1024
"""Size limit of a JSON file that configures something; the largest real ones, which list each expert, have 2 MB."""
MAX_TOKENIZER_BYTES = 256 * 1024 * 1024


def read_bounded(path: str | Path, max_bytes: int = MAX_CONFIG_BYTES) -> bytes:
    """Read the regular file `path` of at most `max_bytes` bytes.

    Raises OSError, whose strerror says what is wrong, also for a pipe or a device, which are not waited for, and for a
    larger file. Raises ValueError for what cannot be a path.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # O_NONBLOCK: a pipe would be waited for
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
    """Find the first of `paths` that a third user may have changed: it belongs neither to root nor to this user, or is
    a folder that all users may write. Raises OSError for a path that cannot be looked at."""
    for path in paths:
        status = path.stat()
        is_open = stat.S_ISDIR(status.st_mode) and status.st_mode & 0o002  # files lie in these folders, with the umask
        if status.st_uid not in (0, os.geteuid()) or is_open:
            return path
    return None
