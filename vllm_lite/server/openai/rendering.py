"""Renderer: renders chats in a process for the template, which is restarted when a template exceeds its limits."""

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable

import msgspec

from vllm_lite.client.text.templates import template_process
from vllm_lite.client.text.templates.template_source import TemplateSource
from vllm_lite.errors import EngineError, ModelError, RequestError
from vllm_lite.runtime import frames, log, supervise
from vllm_lite.server.http.long_work import through
from vllm_lite.transport.time_slice import usual_slices

START_S = 60.0
ANSWER_S = 60.0
"""Timeout for a process that uses no CPU time: one that was stopped, or a machine that stalls."""
END_S = 10.0
"""Timeout for the exit of a process that has closed its socket; on a busy machine that takes time."""
CLOSED = "the server is shutting down"
TOO_MUCH = "killed by SIGPROF"
PIECE_BYTES = 1 << 18
"""Bytes received at a time."""

_answers: msgspec.msgpack.Decoder[template_process.Answer] = msgspec.msgpack.Decoder(template_process.Answer)
logger = log.get(__name__)


class TextTooLongError(RequestError):
    """The rendered chat has more characters than the limit."""

    def __init__(self, message: str, num_chars: int) -> None:
        super().__init__(message)
        self.num_chars = num_chars


class Renderer:
    """Renders one template, one chat at a time."""

    def __init__(self, template: TemplateSource) -> None:
        """Start the process. Raises ModelError for a template that cannot be read."""
        self._template = template
        self._wire: socket.socket | None = None
        self._child: supervise.Child
        self._ended = threading.Event()
        self._busy = asyncio.Lock()
        self._is_closed = False
        self.num_starts = 0
        self.takes_tools = template.takes_tools
        self._start()

    async def render(
        self, chat: template_process.Render, is_wanted: Callable[[], Awaitable[bool]], num_bytes: int = 0
    ) -> template_process.Rendered:
        """Render `chat`, of about `num_bytes`. `is_wanted` is called first: whether its client still waits.

        Raises RequestError, also when the template exceeds its limits, and EngineError if its process cannot be used.
        """
        async with self._busy:
            if not await is_wanted():
                raise RequestError("the client has gone")
            try:
                answer = await self._asked(chat, num_bytes)
            except OverflowError as error:
                text = "integers of chat_template_kwargs, tools and messages may have at most 64 bits"
                raise RequestError(text) from error
            except (ModelError, OSError) as error:
                raise EngineError(f"the chat template cannot be rendered: {error}") from error
        if isinstance(answer, template_process.RenderRefused):
            if answer.num_chars is not None:
                raise TextTooLongError(answer.message, answer.num_chars)
            raise RequestError(answer.message)
        return answer

    @property
    def pid(self) -> int:
        return self._child.pid

    def close(self) -> None:
        """Accept no more chats. Waiting ones fail because the server ends."""
        self._is_closed = True
        threading.Thread(target=self._child.stop, args=(0.0,), daemon=True).start()
        if not self._busy.locked():
            self._end(0.0)

    async def _asked(self, chat: template_process.Render, num_bytes: int) -> template_process.Answer:
        """The process's answer. Raises OSError, ModelError, OverflowError, or RequestError if the chat killed the
        process."""
        data = await through(num_bytes, lambda: frames.frame(chat.without_copies()))
        if self._is_closed:
            raise OSError(CLOSED)
        if self._wire is not None and _has_ended(self._wire):  # the process was killed from outside
            self._end(0.0)
        wire = self._wire
        if wire is None:
            wire = await asyncio.to_thread(self._start)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(ANSWER_S):
                await loop.sock_sendall(wire, data)
                data.clear()  # the process has it, and needs the memory
                length = int.from_bytes(await _received(wire, frames.LENGTH_BYTES), "little")
                answer = await _received(wire, length)
                return await through(length, lambda: _answers.decode(answer))
        except (OSError, TimeoutError):
            reason = await asyncio.to_thread(self._end, END_S)
            if reason != TOO_MUCH:
                raise OSError(CLOSED if self._is_closed else reason) from None
            logger.warning("the chat template took too much; its process is started again with the next chat")
            raise RequestError(f"the model's chat template takes too much: {template_process.LIMIT}") from None
        except BaseException:  # the rest of this answer would be read as the next one
            self._end(0.0)
            raise

    def _start(self) -> socket.socket:
        """Start a process and return the socket to it. Raises ModelError."""
        ours, theirs = socket.socketpair()
        self._ended.clear()
        with theirs, usual_slices():  # the loop has the shortest slice, which templates must not inherit
            settings, ended = template_process.RenderSettings(theirs.fileno()), self._ended
            try:
                self._child = supervise.spawn(
                    template_process.__name__, settings, "chat template", lambda _: ended.set(), fds=(theirs.fileno(),)
                )
            except BaseException:
                ours.close()
                raise
        self.num_starts += 1
        try:
            ours.settimeout(START_S)
            ours.sendall(frames.frame(self._template))
            data = frames.read_frame(ours)
            if not data:
                raise ConnectionResetError
        except OSError as error:
            ours.close()
            reason = self._end(END_S)
            text = "compiling it takes too long" if reason == TOO_MUCH else reason
            raise ModelError(f"{self._template.name}: the chat template cannot be read: {text}") from error
        answer = _answers.decode(data)
        if isinstance(answer, template_process.RenderRefused):
            ours.close()
            raise ModelError(answer.message)
        ours.setblocking(False)
        self._wire = ours
        return ours

    def _end(self, patience_s: float) -> str:
        """End the process. Returns the reason if it had exited by itself, waiting up to `patience_s` to learn it."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None
        self._ended.wait(patience_s)
        reason = self._child.exited()
        if reason is None:
            threading.Thread(target=self._child.stop, args=(0.0,), daemon=True).start()
        return reason or "it does not answer"


def _has_ended(wire: socket.socket) -> bool:
    """Whether the other side has closed; the kernel knows before the thread that waits for the process."""
    try:
        return not wire.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


async def _received(wire: socket.socket, count: int) -> bytearray:
    loop, data, place = asyncio.get_running_loop(), bytearray(count), 0
    while place < count:
        num_new = await loop.sock_recv_into(wire, memoryview(data)[place : place + PIECE_BYTES])
        if not num_new:
            raise ConnectionResetError
        place += num_new
    return data
