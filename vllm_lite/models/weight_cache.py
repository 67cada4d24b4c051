"""`--weight-cache`: packed weights in files, so that a start does not quantize and pack them again. No torch.

    DIR/<40 hex digits>.packed     weights of one rank of one model with its settings; a newer file replaces it
    DIR/.draft-<pid>-<hex digits>  a file being written; its writer holds a lock on it

A file is used if its key says that the same program would pack the same weights on this processor, and all its packing
keys are the model's. On any failure the engine starts without the cache. Only a directory that other users may enter is
an error, because one who writes there controls the model's output.
"""

import errno
import fcntl
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

import msgspec

from vllm_lite.checkpoint.gguf.files import gguf_files
from vllm_lite.checkpoint.quantization.on_load import GROUPS, TILE_GROUP
from vllm_lite.checkpoint.shard import Shard
from vllm_lite.checkpoint.tensors.headers import identity, weight_files
from vllm_lite.config import ResolvedConfig
from vllm_lite.errors import ConfigError, ModelError, VllmLiteError
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu import isa, library
from vllm_lite.kernels.cpu.weights.file_packer import FORMS, NICENESS, FilePacker, Packed
from vllm_lite.kernels.cpu.weights.packed_file import PackedFile, PackedWriter, Unfit
from vllm_lite.kv_disk.fingerprint import file_digest
from vllm_lite.kv_disk.private_directory import Purpose, check_private, make_private
from vllm_lite.models.ahead import pack_ahead, pack_wanted
from vllm_lite.runtime import log

MODEL, SELF_COPY = "model", "self"
"""Parts with a file each: the weights of a model, and those of the copy that drafts for it."""
UNUSED_S = 30 * 86400.0
"""A file that was not read for so long is removed when another is written."""
SPARE_BYTES = 1 << 30
"""Free space that must remain on the disk."""
KEEP_S = 1.0
"""Time that a start waits for the last weights to be written."""
_PACKED, _DRAFT = re.compile(r"[0-9a-f]{40}\.packed"), re.compile(r"\.draft-[0-9]+-[0-9a-f]+")
_PURPOSE = Purpose("weight_cache", "holds the weights that a model answers with", "change what a model answers")

logger = log.get(__name__)


class PackedSource(Protocol):
    """Weights that are packed before layers request them, for example a FilePacker."""

    def serves(self, wanted: Collection[Hashable]) -> bool:
        """Whether all its weights have packing keys in `wanted`; if not, closes the source."""
        ...

    def take(self, key: Hashable, waiting: Callable[[], object]) -> Packed | None:
        """See FilePacker.take."""
        ...

    def close(self) -> None: ...


def packed_weights(
    config: ResolvedConfig, rank: int, num_threads: int, niceness: int = NICENESS
) -> PackedSource | None:
    """Begin to read the packed weights of worker `rank`, or else to pack them: see pack_ahead. Raises ConfigError."""
    cache = WeightCache.of(config, Shard.of(config, rank, config.num_stages), MODEL)
    if cache is None:
        return pack_ahead(config, rank, num_threads, niceness)
    return cache.read() or Keeper(cache, num_threads, pack_ahead(config, rank, num_threads, niceness))


@contextmanager
def packed_copy(config: ResolvedConfig, shard: Shard, num_threads: Callable[[], int]) -> Iterator[PackedSource | None]:
    """Yield the drafting copy's packed weights, None without a cache; on exit write new ones to the cache."""
    cache = WeightCache.of(config, shard, SELF_COPY)
    if cache is None:
        yield None
    elif (stored := cache.read()) is not None:
        with closing(stored):
            yield stored
    else:
        with closing(Keeper(cache, num_threads())) as keeper:
            yield keeper
            keeper.keep()


def kept_private(config: ResolvedConfig) -> ResolvedConfig:
    """Settings of a worker that replaces a dead one. Disables the cache if other users can enter its directory by now,
    instead of failing a start for which streams wait."""
    if config.weight_cache is None:
        return config
    folder = Path(config.weight_cache).expanduser()
    try:
        make_private(folder)
        check_private(folder, _PURPOSE)
    except ConfigError as error:
        logger.warning("%s; weights are packed without it", error)
        return msgspec.structs.replace(config, weight_cache=None)
    except OSError:  # WeightCache.of reports it
        pass
    return config


class WeightCache:
    """The file of one rank's weights in the directory."""

    def __init__(self, config: ResolvedConfig, shard: Shard, part: str, folder: Path) -> None:
        """Raises OSError or ModelError if the checkpoint cannot be read."""
        self.folder = folder
        self.model = Path(config.model).resolve()
        model = (str(self.model), config.pooling.hf_overrides)
        self._place = repr((model, config.dtype, config.quantization, part, shard, isa())).encode()
        self.path = folder / f"{blake2b(self._place, digest_size=20).hexdigest()}.packed"
        self._identities = {file: identity(file.stat()) for file in weight_files(self.model)}
        self.key = self._make_key()

    @classmethod
    def of(cls, config: ResolvedConfig, shard: Shard, part: str) -> "WeightCache | None":
        """Open the cache; None if these weights are not cached. Raises ConfigError if other users can enter the
        directory."""
        if config.weight_cache is None or config.load_format == "dummy":
            return None
        if config.device != "cpu" or not cpu.available():
            logger.info("weight_cache is not used: it is for weights packed by the native kernels of a CPU")
            return None
        if part == MODEL and config.quantization is None:
            logger.info("weight_cache is not used: only weights quantized on load take longer to pack than to read")
            return None
        folder = Path(config.weight_cache).expanduser()
        try:
            make_private(folder)
            check_private(folder, _PURPOSE)
            if gguf_files(Path(config.model)):
                logger.info("weight_cache is not used: it keeps weights of safetensors, and this is a GGUF file")
                return None
            return cls(config, shard, part, folder)
        except OSError as error:
            logger.warning("weight_cache %s is not used: %s", folder, error.strerror or error)
        except ModelError:  # the loader reports it
            pass
        return None

    def read(self) -> "CachedWeights | None":
        """Begin to read the file; None if there is none that fits."""
        try:
            return CachedWeights(self, PackedFile(self.path, self.key))
        except FileNotFoundError:
            return None
        except (OSError, Unfit) as error:
            logger.info("packed weights in %s are not used: %s", self.path, error)
            return None

    def write(self, weights: Iterable[tuple[bytes, Packed]]) -> None:
        """Write the file from `weights` as they come; if that raises, no file is left. Raises OSError."""
        began_s = time.monotonic()
        self._sweep()
        # In containers all workers may have the same pid, and its draft may be left over.
        draft = self.folder / f".draft-{os.getpid()}-{secrets.token_hex(8)}"
        file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            writer = PackedWriter(file, self.key)
            for name, packed in weights:
                self._check_room(packed)
                writer.add(name, packed)
            writer.end()
            self._check_unchanged()
            draft.replace(self.path)
        except BaseException:
            with suppress(OSError):
                draft.unlink()
            raise
        finally:
            os.close(file)
        took_s = time.monotonic() - began_s
        logger.info("%.1f MB of packed weights kept in %s in %.1f s", writer.num_bytes / 1e6, self.path, took_s)

    def is_current(self) -> bool:
        """Whether the checkpoint's files are still those of the key."""
        with suppress(OSError):
            return all(identity(file.stat()) == known for file, known in self._identities.items())
        return False

    def remove(self) -> None:
        with suppress(OSError):
            self.path.unlink()

    def _check_room(self, packed: Packed) -> None:
        status = os.statvfs(self.folder)
        if status.f_bavail * status.f_frsize < packed.data.nbytes + SPARE_BYTES:
            raise OSError(errno.ENOSPC, f"less than {SPARE_BYTES >> 30} GiB would be left free")

    def _check_unchanged(self) -> None:
        if self._make_key() != self.key:
            raise OSError(0, "the checkpoint has changed meanwhile")

    def _make_key(self) -> bytes:
        """Digest of all that packed weights depend on, except their packing keys."""
        state = blake2b(self._place, digest_size=32)
        parts: list[object] = [library.digest(), sorted(FORMS.items()), sorted(GROUPS.items()), TILE_GROUP]
        for file in weight_files(self.model):
            status = file.stat()
            parts += [file.name, status.st_size, status.st_mtime_ns, file_digest(file)]
        state.update(repr(parts).encode())
        return state.digest()

    def _sweep(self) -> None:
        """Remove files that were not used for UNUSED_S, and drafts whose writers have ended."""
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with suppress(OSError):
                    if not entry.is_file(follow_symlinks=False):
                        continue
                    unused_s = time.time() - entry.stat(follow_symlinks=False).st_mtime
                    is_old = _PACKED.fullmatch(entry.name) is not None and unused_s > UNUSED_S
                    if is_old or (_DRAFT.fullmatch(entry.name) is not None and _is_left(entry.path)):
                        os.unlink(entry.path)


class CachedWeights:
    """Packed weights read from the cache."""

    def __init__(self, cache: WeightCache, file: PackedFile) -> None:
        self._cache, self._file = cache, file

    def serves(self, wanted: Collection[Hashable]) -> bool:
        """See FilePacker.serves. A file that does not fit is removed, so that the next start writes a new one."""
        if self._cache.is_current() and self._file.names <= {name_of(key) for key in wanted}:
            logger.info("%.1f MB of packed weights are read from %s", self._file.num_bytes / 1e6, self._file.path)
            return True
        self.close()
        self._cache.remove()
        return False

    def take(self, key: Hashable, waiting: Callable[[], object] = lambda: None) -> Packed | None:
        """See FilePacker.take; returns None for weights that a damaged file lacks, which the loader then packs."""
        return self._file.take(name_of(key), waiting)

    def close(self) -> None:
        if self._file.is_damaged and not self._file.is_closed:
            logger.warning("%s is damaged: weights are packed again, and it is removed", self._file.path)
            self._cache.remove()
        self._file.close()


class Keeper:
    """Packs weights, which a thread writes to the cache as they are taken."""

    def __init__(self, cache: WeightCache, num_threads: int, ahead: FilePacker | None = None) -> None:
        self._cache, self._num_threads = cache, num_threads
        self._packers = [] if ahead is None else [ahead]
        self._taken: SimpleQueue[tuple[bytes, Packed] | None] = SimpleQueue()
        self._writer: threading.Thread | None = None
        self._is_kept = False

    def serves(self, wanted: Collection[Hashable]) -> bool:
        """Return True. Begins to pack the `wanted` weights that are not being packed yet."""
        self._packers = [packer for packer in self._packers if packer.serves(wanted)]
        missing = set(wanted).difference(*(packer.jobs for packer in self._packers))
        if missing and (late := pack_wanted(missing, self._cache.model, self._num_threads)) is not None:
            self._packers.append(late)
        return True

    def take(self, key: Hashable, waiting: Callable[[], object] = lambda: None) -> Packed | None:
        for packer in self._packers:
            if (packed := packer.take(key, waiting)) is not None:
                self._taken.put((name_of(key), packed))
                if self._writer is None:
                    self._writer = threading.Thread(target=self._write, name="weight cache", daemon=True)
                    self._writer.start()
                return packed
        return None

    def keep(self) -> None:
        """Let the thread finish the file; called once all weights are loaded. The model may be used meanwhile, as its
        weights do not change. Waits up to KEEP_S, so that short scripts leave a cache, too. A process that ends earlier
        leaves a draft, which the next writer removes."""
        self._is_kept = True
        self._taken.put(None)
        if self._writer is not None:
            self._writer.join(KEEP_S)

    def close(self) -> None:
        """Stop packing, and discard the file unless `keep` was called."""
        self._taken.put(None)
        for packer in self._packers:
            packer.close()

    def _write(self) -> None:
        with suppress(OSError):  # other work of the start has priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            self._cache.write(self._until_all())
        except (OSError, VllmLiteError) as error:
            reason, folder = getattr(error, "strerror", None) or error, self._cache.folder
            logger.warning("weight_cache %s is not written, so each start packs weights again: %s", folder, reason)
        except _NotLoadedError:
            pass

    def _until_all(self) -> Iterator[tuple[bytes, Packed]]:
        while (taken := self._taken.get()) is not None:
            yield taken
        if not self._is_kept:
            raise _NotLoadedError


class _NotLoadedError(Exception):
    """The model was not loaded, so its weights are incomplete."""


def name_of(key: Hashable) -> bytes:
    """Name of a packing key in files."""
    return blake2b(msgspec.msgpack.encode(key), digest_size=20).digest()


def _is_left(draft: str) -> bool:
    """Whether a draft's writer has ended. A new draft may not be locked yet."""
    if abs(time.time() - os.stat(draft).st_mtime) < 10.0:
        return False
    file = os.open(draft, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(file)
    return True
