"""Cuts images into tiles in a process of its own, so that the kernel bounds the time and memory that a file takes.

Each ImageJob is answered with ImageTiles or ImageRefused, in order. A file that takes more processor time ends the
process, and its owner starts another.
"""

import resource
import signal
import socket

import msgspec

from vllm_lite.client.media.patches import ImagePatches, PatchSettings, patches_of
from vllm_lite.client.media.tiles import ImageTiles, TileSettings, tiles_of
from vllm_lite.errors import RequestError
from vllm_lite.runtime.frames import frame, read_frame
from vllm_lite.runtime.supervise import run_child
from vllm_lite.runtime.wakeup import Wakeup

MAX_CPU_S = 20.0
"""Processor time of one image. A photo of 12 million pixels takes 0.4 s."""
MAX_MEMORY_BYTES = 2 * 1024**3
"""Address space of the process."""


ProcessorSettings = TileSettings | PatchSettings
Made = ImageTiles | ImagePatches
"""An image as a processor makes it."""


class ImageSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`fd` is the open end of the socket."""

    fd: int
    processor: ProcessorSettings


class ImageJob(msgspec.Struct, frozen=True):
    """An image, as a file."""

    data: bytes


class ImageRefused(msgspec.Struct, frozen=True, tag=True):
    message: str


Answer = ImageTiles | ImagePatches | ImageRefused


def main(settings: ImageSettings, stop: Wakeup) -> int:
    """Cut images until the other end of the socket is closed."""
    del stop  # a signal ends it at once
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=settings.fd) as wire:
        while data := read_frame(wire):
            signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
            wire.sendall(frame(answer(bytes(msgspec.msgpack.decode(data, type=ImageJob).data), settings.processor)))
            signal.setitimer(signal.ITIMER_PROF, 0)
    return 0


def num_bytes(made: Made) -> int:
    return sum(map(len, made.tiles)) if isinstance(made, ImageTiles) else len(made.colors)


def answer(data: bytes, settings: ProcessorSettings) -> Answer:
    """The image, or the sentence that says why there is none."""
    try:
        return tiles_of(data, settings) if isinstance(settings, TileSettings) else patches_of(data, settings)
    except RequestError as error:
        return ImageRefused(str(error))
    except MemoryError:
        return ImageRefused("the image takes too much memory")


if __name__ == "__main__":
    run_child(main, ImageSettings)
