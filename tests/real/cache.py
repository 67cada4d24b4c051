"""Folder of real checkpoints: the cache of scripts/fetch_real.py, which lists its contents."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from fetch_real import STAMP, real_folder  # noqa: E402 - found only once scripts/ is on the path


def folder_of(package: str) -> Path | None:
    """The folder of a package that was fetched whole."""
    folder = real_folder() / package
    return folder if (folder / STAMP).is_file() else None


def files_of(package: str, pattern: str) -> list[Path]:
    """Files of a package, [] if it is not there: for lists of cases."""
    folder = folder_of(package)
    return [] if folder is None else sorted(folder.glob(pattern))
