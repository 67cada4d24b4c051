"""The child processes that cut images, and the tiles that they have made lately."""

import socket
import threading
from collections import OrderedDict
from contextlib import suppress
from hashlib import blake2b

import msgspec

from vllm_lite.client.media import image_process
from vllm_lite.client.media.image_process import (
    Answer,
    ImageJob,
    ImageRefused,
    ImageSettings,
    Made,
    ProcessorSettings,
    num_bytes,
)
from vllm_lite.errors import RequestError
from vllm_lite.runtime import supervise
from vllm_lite.runtime.frames import frame, read_frame

NUM_PROCESSES = 2
ANSWER_S = 60.0
"""For what no processor time counts: a process that was stopped, a machine that stands still."""
MAX_KEPT_BYTES = 256 * 1024 * 1024
"""Images that are kept: every message of a chat brings the images of those before it again."""

_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class _Process:
    """One child and the socket to it."""

    def __init__(self, settings: ProcessorSettings) -> None:
        self.wire, theirs = socket.socketpair()
        with theirs:
            own = ImageSettings(theirs.fileno(), settings)
            self.child = supervise.spawn(
                image_process.__name__, own, "image process", lambda _: None, fds=(theirs.fileno(),)
            )
        self.wire.settimeout(ANSWER_S)

    def asked(self, data: bytes) -> Answer:
        """Raises OSError if the process has ended, or takes too long."""
        self.wire.sendall(frame(ImageJob(data)))
        received = read_frame(self.wire)
        if not received:
            raise ConnectionResetError
        return _answers.decode(received)

    def end(self) -> None:
        self.wire.close()
        self.child.stop(0.0)


class ImagePool:
    """Cuts images for one model, at most NUM_PROCESSES at a time; others wait. Safe in any thread."""

    def __init__(self, settings: ProcessorSettings) -> None:
        """Processes are started when they are needed."""
        self.settings = settings
        self.num_asked = 0
        self.num_found = 0
        """Images that were asked for, and those of them that were kept from before."""
        self.num_cut = 0
        self._turns = threading.BoundedSemaphore(NUM_PROCESSES)
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._kept: OrderedDict[bytes, Made] = OrderedDict()
        self._kept_bytes = 0

    def made(self, data: bytes) -> Made:
        """The image in this file, as the model's processor makes it. Raises RequestError in one sentence."""
        digest = blake2b(data, digest_size=32).digest()
        with self._lock:
            self.num_asked += 1
            if (known := self._kept.get(digest)) is not None:
                self.num_found += 1
                self._kept.move_to_end(digest)
                return known
        with self._turns:
            answer = self._asked(data)
        if isinstance(answer, ImageRefused):
            raise RequestError(answer.message)
        self._keep(digest, answer)
        return answer

    def _asked(self, data: bytes) -> Answer:
        with self._lock:
            process = self._idle.pop() if self._idle else None
            self.num_cut += 1
        process = process or _Process(self.settings)
        try:
            answer = process.asked(data)
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

    def _keep(self, digest: bytes, made: Made) -> None:
        with self._lock:
            if digest in self._kept:
                return
            self._kept[digest] = made
            self._kept_bytes += num_bytes(made)
            while self._kept_bytes > MAX_KEPT_BYTES:
                _, gone = self._kept.popitem(last=False)
                self._kept_bytes -= num_bytes(gone)

    def close(self) -> None:
        """End the processes that do nothing; one that works ends with this process."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            with suppress(OSError):
                process.end()
