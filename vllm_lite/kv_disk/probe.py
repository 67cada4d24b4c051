"""DiskProbe: the disk of a KV cache: its kind of file system, its free space, and its write and read rates."""

import mmap
import os
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

PROBE_BYTES = 64 << 20
PART_BYTES = 4 << 20
MAX_PROBE_S = 3.0
"""Maximum time of the probe; a slower disk is measured by the bytes written until then."""
MEMORY_KINDS = frozenset(("tmpfs", "ramfs"))
NETWORK_KINDS = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "9p", "afs", "glusterfs", "beegfs")
)
CONTAINER_KINDS = frozenset(("overlay", "aufs"))


class DiskProbe(NamedTuple):
    """Properties of a folder's disk; rates are 0 if nothing could be written."""

    kind: str
    free_bytes: int
    write_bytes_per_s: float
    read_bytes_per_s: float

    @property
    def warning(self) -> str | None:
        """A warning about storing KV in this folder; None if there is none."""
        kind = self.kind.removeprefix("fuse.")
        if kind in MEMORY_KINDS:
            return f"{kind} is memory: KV in it takes RAM and is gone after a reboot"
        if kind in CONTAINER_KINDS:
            return f"{kind} is the container's own layer, and is gone with it: mount a volume"
        if kind in NETWORK_KINDS or self.kind.startswith("fuse."):
            return f"{self.kind} is reached over a network, or by another process: loads are as slow as that"
        return None


def probe_disk(folder: Path) -> DiskProbe:
    """Probe the file system of `folder`, or of its first existing parent. Raises OSError."""
    place = folder.expanduser().absolute()
    while not place.is_dir():
        place = place.parent
    status = os.statvfs(place)
    free_bytes = status.f_bavail * status.f_frsize
    rates = _rates(place) if free_bytes > 2 * PROBE_BYTES else (0.0, 0.0)
    return DiskProbe(file_system(place), free_bytes, *rates)


def file_system(folder: Path) -> str:
    """The kind of `folder`'s file system, by the kernel's name; "unknown" if it is not listed."""
    path, found, kind = os.path.realpath(folder), "", "unknown"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        mounted_on = before.split()[4].encode().decode("unicode_escape")
        is_above = mounted_on in ("/", path) or path.startswith(mounted_on + "/")
        if is_above and len(mounted_on) >= len(found):  # of two mounts on one folder the later one is visible
            found, kind = mounted_on, after.split()[0]
    return kind


def _rates(place: Path) -> tuple[float, float]:
    """Bytes per second written to the disk itself, and read from it again."""
    with mmap.mmap(-1, PART_BYTES) as data, tempfile.TemporaryFile(prefix=".vl-probe-", dir=place, buffering=0) as file:
        data.write(os.urandom(PART_BYTES))
        descriptor, num_bytes, began_s = file.fileno(), 0, time.perf_counter()
        while num_bytes < PROBE_BYTES and time.perf_counter() - began_s < MAX_PROBE_S:
            num_bytes += os.pwrite(descriptor, data, num_bytes)
            os.fdatasync(descriptor)
        write_s = time.perf_counter() - began_s
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        at, began_s = 0, time.perf_counter()
        while at < num_bytes and time.perf_counter() - began_s < MAX_PROBE_S:
            at += os.preadv(descriptor, [data], at)
        read_s = time.perf_counter() - began_s
    return num_bytes / max(write_s, 1e-9), at / max(read_s, 1e-9)
