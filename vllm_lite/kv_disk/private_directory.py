"""Directories that only their user can enter: created with mode 0700, and refused, never repaired, if others can
enter."""

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from vllm_lite.errors import ConfigError


class Purpose(NamedTuple):
    """The setting that names the directory, and the reason for its privacy, as phrases for errors."""

    setting: str
    owned: str
    """Continues "...: it"."""
    closed: str
    """Continues "so that others may"."""


def make_private(path: Path) -> None:
    """Create the directory if it is missing. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)


def check_private(path: Path, purpose: Purpose) -> Path:
    """Raise ConfigError unless `path` is a directory of this user that nobody else can enter."""
    setting = purpose.setting
    try:
        status = path.lstat()
    except OSError as error:
        raise ConfigError(f"{setting} {path} cannot be read: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{setting} {path} is not a directory; give one, not a link to it or a file")
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"{setting} {path} belongs to user {status.st_uid}, not to {os.geteuid()} as whom this runs: it "
            f"{purpose.owned}; give a directory of your own"
        )
    if status.st_mode & 0o077:
        raise ConfigError(
            f"{setting} {path} has mode {stat.S_IMODE(status.st_mode):04o}, so that others may {purpose.closed}; "
            f"expected 0700: chmod 700 {path}"
        )
    return path
