"""The child processes that preprocess images, and a cache of their results."""

import os
import socket
import threading
from collections import OrderedDict
from contextlib import suppress
from hashlib import blake2b

import msgspec

from vllm_lite.client.media import image_process
from vllm_lite.client.media.image_process import Answer, ImageJob, ImageRefused, ImageSettings
from vllm_lite.client.media.processors import Preprocessed, ProcessorSettings
from vllm_lite.client.media.sources import GivenImage
from vllm_lite.errors import RequestError
from vllm_lite.runtime import supervise
from vllm_lite.runtime.frames import frame, read_frame
from vllm_lite.transport.time_slice import usual_slices

NUM_PROCESSES = 2
ANSWER_S = 60.0
"""Time limit of an answer, for cases without processor time: a stopped process, a suspended machine."""
MAX_KEPT_BYTES = 256 * 1024 * 1024
"""Maximum bytes of cached images; every message of a chat repeats the images of the messages before it."""

MAX_UUIDS = 4096
"""Maximum number of remembered names of images; an image that is not cached has none."""

_Key = tuple[bytes, ProcessorSettings]
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class _Process:
    """One child and the socket to it."""

    def __init__(self, lock_fd: int) -> None:
        self.wire, theirs = socket.socketpair()
        with theirs, usual_slices():  # the thread that starts it may pass messages on; images must not interrupt others
            own = ImageSettings(theirs.fileno(), lock_fd)
            self.child = supervise.spawn(
                image_process.__name__, own, "image process", lambda _: None, fds=(theirs.fileno(), lock_fd)
            )
        self.wire.settimeout(ANSWER_S)

    def asked(self, job: ImageJob) -> Answer:
        """Raises OSError if the process has ended, or takes too long."""
        self.wire.sendall(frame(job))
        received = read_frame(self.wire)
        if not received:
            raise ConnectionResetError
        return _answers.decode(received)

    def end(self) -> None:
        self.wire.close()
        self.child.stop(0.0)


class ImagePool:
    """Preprocesses images for one model, at most NUM_PROCESSES at a time; others wait. Thread-safe."""

    def __init__(self, settings: ProcessorSettings) -> None:
        """Processes are started on demand."""
        self.settings = settings
        self.num_asked = 0
        self.num_found = 0
        """Numbers of requested images, and of those found in the cache."""
        self.num_cut = 0
        self._turns = threading.BoundedSemaphore(NUM_PROCESSES)
        self._lock = threading.Lock()
        self._lock_fd = os.memfd_create("images")
        self._idle: list[_Process] = []
        self._kept: OrderedDict[_Key, Preprocessed] = OrderedDict()
        self._kept_bytes = 0
        self._by_uuid: OrderedDict[tuple[str, str], bytes] = OrderedDict()  # (owner, uuid) -> the file's digest

    def made(self, image: GivenImage, settings: ProcessorSettings | None = None) -> Preprocessed:
        """Preprocess an image by the model's settings, or by `settings`. Raises RequestError with one sentence."""
        settings = settings or self.settings
        digest = None if image.data is None else blake2b(image.data, digest_size=32).digest()
        with self._lock:
            self.num_asked += 1
            digest = digest or self._by_uuid.get((image.owner, image.uuid))
            known = None if digest is None else self._kept.get((digest, settings))
            if digest is not None and known is not None:
                self.num_found += 1
                self._kept.move_to_end((digest, settings))
                self._call(image, digest)
                return known
        if image.data is None or digest is None:
            raise RequestError(
                f"the image with the uuid {image.uuid[:64]!r} is not held here, or not any more; send it once more"
            )
        with self._turns:
            answer = self._asked(ImageJob(image.data, settings))
        if isinstance(answer, ImageRefused):
            raise RequestError(answer.message)
        self._keep((digest, settings), answer)
        with self._lock:
            self._call(image, digest)
        return answer

    def _call(self, image: GivenImage, digest: bytes) -> None:
        """Remember the name of an image; the lock is held."""
        if image.uuid:
            self._by_uuid[image.owner, image.uuid] = digest
            self._by_uuid.move_to_end((image.owner, image.uuid))
            if len(self._by_uuid) > MAX_UUIDS:
                self._by_uuid.popitem(last=False)

    def _asked(self, job: ImageJob) -> Answer:
        with self._lock:
            process = self._idle.pop() if self._idle else None
            self.num_cut += 1
        process = process or _Process(self._lock_fd)
        try:
            answer = process.asked(job)
        except (OSError, msgspec.MsgspecError):
            process.end()
            limits = f"{image_process.MAX_CPU_S:g} s of processor time"
            raise RequestError(f"the image takes too long or breaks its decoder; each gets {limits}") from None
        except BaseException:  # in the middle of an answer, which nobody will read
            process.end()
            raise
        with self._lock:
            self._idle.append(process)
        return answer

    def _keep(self, key: _Key, made: Preprocessed) -> None:
        with self._lock:
            if key in self._kept:
                return
            self._kept[key] = made
            self._kept_bytes += made.num_bytes
            while self._kept_bytes > MAX_KEPT_BYTES:
                _, gone = self._kept.popitem(last=False)
                self._kept_bytes -= gone.num_bytes

    def close(self) -> None:
        """End idle processes; a busy one ends with this process."""
        with self._lock:
            idle, self._idle = self._idle, []
            if self._lock_fd >= 0:
                os.close(self._lock_fd)
            self._lock_fd = -1
        for process in idle:
            with suppress(OSError):
                process.end()
