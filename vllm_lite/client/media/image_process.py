"""Preprocesses images in a process of its own, so that the kernel limits time and memory per file.

Each ImageJob is answered in order, with the preprocessed image or with ImageRefused. A file that takes more processor
time ends the process, and its owner starts another.
"""

import ctypes
import fcntl
import os
import resource
import signal
import socket

import msgspec

from vllm_lite.client.media.decoding import BIG_PIXELS, header_of
from vllm_lite.client.media.processors import Preprocessed, ProcessorSettings, preprocessed
from vllm_lite.errors import RequestError
from vllm_lite.runtime.frames import frame, read_frame
from vllm_lite.runtime.supervise import run_child
from vllm_lite.runtime.wakeup import Wakeup

MAX_CPU_S = 20.0
"""Maximum processor time of one image. A photo of 12 million pixels takes 0.4 s."""
MAX_MEMORY_BYTES = 2 * 1024**3
"""Maximum address space of the process."""

NICENESS = 5
"""Niceness of the process: with this value it gets a quarter of an engine thread's share of a busy core."""
M_MMAP_THRESHOLD, MAPPED_BYTES = -3, 256 * 1024
"""glibc's option, and the size from which an allocation is mapped separately."""


class ImageSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`fd`: the open end of the socket; `lock_fd`: a file for the lock that all processes of a pool share."""

    fd: int
    lock_fd: int


class ImageJob(msgspec.Struct, frozen=True):
    """An image file, and the settings for its preprocessing."""

    data: bytes
    processor: ProcessorSettings


class ImageRefused(msgspec.Struct, frozen=True, tag=True):
    message: str


Answer = Preprocessed | ImageRefused


def main(settings: ImageSettings, stop: Wakeup) -> int:
    """Preprocess images until the other end of the socket is closed."""
    del stop  # a signal ends it at once
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICENESS)
    give_memory_back()
    with socket.socket(fileno=settings.fd) as wire:
        while data := read_frame(wire):
            signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
            job = msgspec.msgpack.decode(data, type=ImageJob)
            wire.sendall(frame(_answer_in_turn(bytes(job.data), job.processor, settings.lock_fd)))
            signal.setitimer(signal.ITIMER_PROF, 0)
    return 0


def give_memory_back() -> None:
    """Let the C library return freed memory at once. By default it keeps as much as was once freed in one piece."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)


def _answer_in_turn(data: bytes, settings: ProcessorSettings, lock_fd: int) -> Answer:
    """See `answer`; a big image is decoded only while no other process decodes one."""
    try:
        is_big = header_of(data).counted > BIG_PIXELS
    except RequestError as error:
        return ImageRefused(str(error))
    if not is_big:
        return answer(data, settings)
    fcntl.lockf(lock_fd, fcntl.LOCK_EX)  # which ends with the process, however that ends
    try:
        return answer(data, settings)
    finally:
        fcntl.lockf(lock_fd, fcntl.LOCK_UN)


def answer(data: bytes, settings: ProcessorSettings) -> Answer:
    """Make the image, or a refusal with the reason."""
    try:
        return preprocessed(data, settings)
    except RequestError as error:
        return ImageRefused(str(error))
    except MemoryError:
        return ImageRefused("the image takes too much memory")


if __name__ == "__main__":
    run_child(main, ImageSettings)
