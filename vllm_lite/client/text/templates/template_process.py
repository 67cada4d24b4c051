"""Renders a chat template in a process of its own, so that the kernel limits its time and memory.

A sandbox limits what a template can access, but not the time of a nested loop, of `'x' * 10**10`, or of `10**10**10`,
and the last two block every other thread. So the server renders here. Each rendering has a limit of processor time and
memory; one that exceeds the time ends this process, and its owner starts another.

Both sides use a socket and frames (runtime/frames.py). The first frame is the template, answered with
Rendered or RenderRefused; then each Render is answered with one of them, in order.
"""

import gc
import resource
import signal
import socket
from collections.abc import Mapping
from typing import Any

import msgspec

from vllm_lite.client.text.templates.chat_template import ChatTemplate
from vllm_lite.client.text.templates.left_out import LeftOut
from vllm_lite.client.text.templates.message_parts import THOUGHT_NAMES
from vllm_lite.client.text.templates.template_source import TemplateSource
from vllm_lite.errors import ModelError, RequestError
from vllm_lite.runtime.frames import frame, read_frame
from vllm_lite.runtime.supervise import run_child
from vllm_lite.runtime.wakeup import Wakeup

MAX_CPU_S = 1.0
"""Processor time of one rendering. A real template takes 0.1 ms for a chat of some messages."""
MAX_COMPILE_S = 3.0
MAX_MEMORY_BYTES = 512 * 1024 * 1024
"""Address space of the process."""
MAX_LOOKED_AT_BYTES = 1024 * 1024
"""Maximum size of a chat that is rendered again to find left-out messages, because copies take memory."""
LIMIT = f"a rendering may take {MAX_CPU_S:g} s of processor time and {MAX_MEMORY_BYTES >> 20} MiB of memory"


class RenderSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`fd` is the open end of the socket."""

    fd: int


class Render(msgspec.Struct, frozen=True):
    """The arguments of ChatTemplate.rendering. A text of more than `max_chars` is refused.

    `alike` has, by the place of a message, further names of its thought, which is sent under one name alone.
    """

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    continue_final_message: bool
    variables: dict[str, Any]
    max_chars: int
    tools: list[dict[str, Any]] | None = None
    alike: dict[int, list[str]] = {}

    def without_copies(self) -> "Render":
        """Remove the copies that complete() restores."""
        alike = {place: names for place, message in enumerate(self.messages) if (names := _alike(message))}
        messages = [
            {name: value for name, value in message.items() if name not in alike.get(place, ())}
            for place, message in enumerate(self.messages)
        ]
        return msgspec.structs.replace(self, messages=messages, alike=alike) if alike else self

    def complete(self) -> list[dict[str, Any]]:
        """Return the messages with their thinking under all its names, which share one text."""
        for place, names in self.alike.items():
            message = self.messages[place]
            message.update(dict.fromkeys(names, message[THOUGHT_NAMES[0]]))
        return self.messages


class Rendered(msgspec.Struct, frozen=True, tag=True):
    """A rendered prompt. `left_out`: the parts of the messages that are not in the text."""

    text: str
    left_out: tuple[LeftOut, ...] = ()


class RenderRefused(msgspec.Struct, frozen=True, tag=True):
    """A refused rendering. `num_chars`: the length of a text that is too long."""

    message: str
    num_chars: int | None = None


Answer = Rendered | RenderRefused
_TOO_MUCH = RenderRefused(f"the model's chat template takes too much: {LIMIT}")


def _alike(message: Mapping[str, Any]) -> list[str]:
    """Name the fields of a message that have the same thinking as the first such field."""
    first, *others = THOUGHT_NAMES
    return [name for name in others if name in message and message[name] is message.get(first)]


def main(settings: RenderSettings, stop: Wakeup) -> int:
    """Render until the other end of the socket is closed."""
    del stop  # a signal ends it at once
    with socket.socket(fileno=settings.fd) as wire:
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
        wanted = msgspec.msgpack.decode(read_frame(wire), type=TemplateSource)
        limit_cpu(MAX_COMPILE_S)
        try:
            template = ChatTemplate(wanted)
        except ModelError as error:
            wire.sendall(frame(RenderRefused(str(error))))
            return 0
        gc.freeze()
        wire.sendall(frame(Rendered("")))
        serve(wire, template)
    return 0


def serve(wire: socket.socket, template: ChatTemplate) -> None:
    """Answer one chat after another until the socket is closed, even those that exceed the memory."""
    while True:
        try:
            data = read_frame(wire)
        except MemoryError:
            wire.sendall(frame(_TOO_MUCH))
            continue
        if not data:
            return
        limit_cpu(MAX_CPU_S)
        wire.sendall(_answer(template, data))


def _answer(template: ChatTemplate, data: bytearray) -> bytearray:
    """Encode the answer within the limits, because encoding takes memory, too. `data` is emptied once it is decoded."""
    try:
        asked, looks = msgspec.msgpack.decode(data, type=Render), len(data) <= MAX_LOOKED_AT_BYTES
        data.clear()
        made = template.rendering(
            asked.complete(),
            add_generation_prompt=asked.add_generation_prompt,
            continue_final_message=asked.continue_final_message,
            variables=asked.variables,
            tools=asked.tools,
            looks=looks,
        )
        size = len(made.text)
        if size <= asked.max_chars:
            return frame(Rendered(made.text, made.left_out))
        text = f"the model's chat template makes a prompt of {size} characters"
        return frame(RenderRefused(f"{text}; at most {asked.max_chars} are tokenized", size))
    except RequestError as error:
        return frame(_TOO_MUCH if isinstance(error.__cause__, MemoryError) else RenderRefused(str(error)))
    except MemoryError:
        return frame(_TOO_MUCH)
    except UnicodeEncodeError as error:
        return frame(
            RenderRefused(f"the model's chat template makes a prompt that is not valid Unicode: {error.reason}")
        )


def limit_cpu(limit_s: float) -> None:
    """Let the kernel end this process (SIGPROF) after `limit_s` more seconds of processor time."""
    signal.setitimer(signal.ITIMER_PROF, limit_s)


if __name__ == "__main__":
    run_child(main, RenderSettings)
