"""The directory of a KV cache on disk: its permissions, and the seed of the hashes by which its contents are found.

KV reveals prompts, so the directory must be private to its owner: any other is refused, never repaired. The seed is as
secret as a process's random one, and is stored in the directory so that hashes are the same after a restart and in each
engine.
"""

import os
import stat
from contextlib import suppress
from pathlib import Path

from vllm_lite.config import EngineConfig
from vllm_lite.errors import ConfigError
from vllm_lite.kv_disk.private_directory import Purpose, check_private, make_private

SEED_BYTES = 32
_SEED = "seed"
_PURPOSE = Purpose("kv_cache_dir", "holds what people asked", "read what people asked")


def open_directory(name: str) -> Path:
    """Create the directory if it is missing, and check its owner and mode. Raises ConfigError."""
    path = Path(name).expanduser()
    try:
        make_private(path)
    except OSError as error:
        raise ConfigError(f"kv_cache_dir {path} cannot be made: {error.strerror}") from error
    return check_directory(path)


def check_directory(path: Path) -> Path:
    """Raise ConfigError unless `path` is a directory of this user that nobody else can enter."""
    return check_private(path, _PURPOSE)


def read_seed(path: Path) -> str:
    """Return the seed of the hashes, as hexadecimal digits; the first engine draws it. Raises ConfigError.

    The file appears complete, under a name that must not exist yet: of two engines that draw a seed at the same time,
    one wins.
    """
    place = path / _SEED
    if not place.exists():
        _draw_seed(place)
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status, seed = os.fstat(descriptor), file.read(SEED_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{place} cannot be read: {error.strerror}") from error
    if len(seed) != SEED_BYTES or not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{place} has {len(seed)} bytes, expected {SEED_BYTES}; remove it, and with it all KV here")
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{place} has mode {stat.S_IMODE(status.st_mode):04o} and owner {status.st_uid}; expected 0600 and "
            f"{os.geteuid()}: anyone who knows the seed can probe the prompts of others"
        )
    return seed.hex()


def hash_seed(config: EngineConfig) -> str | None:
    """The seed of an engine's hashes: the user's, or its directory's; None: a random one. Raises ConfigError."""
    if config.prefix_hash_seed is not None or config.kv_cache_dir is None:
        return config.prefix_hash_seed
    return read_seed(open_directory(config.kv_cache_dir))


def _draw_seed(place: Path) -> None:
    draft = place.with_name(f".seed-{os.getpid()}-{os.urandom(4).hex()}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(os.urandom(SEED_BYTES))
        with suppress(FileExistsError):
            os.link(draft, place)
    except OSError as error:
        raise ConfigError(f"{place} cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            draft.unlink()
