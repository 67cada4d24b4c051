"""The doctor's check of the disk for KV (--kv-cache-dir)."""

from collections.abc import Iterator
from pathlib import Path

from vllm_lite.errors import ConfigError
from vllm_lite.tools.doctor.checks import GIB, Line, ok_or_warn

MIN_FREE = 1 * GIB
MIN_READ_PER_S = 200e6
"""A slower disk loads a small model's KV no faster than two cores compute it."""


def kv_disk(name: str) -> Iterator[Line]:
    """Check the folder's owner, file system, free space and measured rates."""
    from vllm_lite.kv_disk.directory import check_directory
    from vllm_lite.kv_disk.probe import probe_disk

    folder = Path(name).expanduser()
    if folder.exists():
        try:
            check_directory(folder)
        except ConfigError as error:
            yield Line("FAIL", "KV on disk", str(error), "engines refuse this folder")
    found = probe_disk(folder)
    yield ok_or_warn("KV on disk", f"{folder} is on {found.kind}", found.warning)
    free = f"{found.free_bytes / GIB:.1f} GiB are free"
    yield ok_or_warn("KV on disk", free, "free some, or give another folder" if found.free_bytes < MIN_FREE else None)
    if not found.read_bytes_per_s:
        return
    rates = f"{found.write_bytes_per_s / 1e6:.0f} MB/s written, {found.read_bytes_per_s / 1e6:.0f} MB/s read, measured"
    is_slow = found.read_bytes_per_s < MIN_READ_PER_S
    yield ok_or_warn("KV on disk", rates, "computing KV again is as fast as loading it" if is_slow else None)
