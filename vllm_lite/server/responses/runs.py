"""Runs: responses that are being generated, each by a task of its own, with or without a reader.

The task writes events into a log, and connections read the log. So a broken connection has no effect, and after an
engine's death the call pauses until the next engine continues it.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec

from vllm_lite.runtime import log
from vllm_lite.server.calls.call import Call
from vllm_lite.server.calls.registry import Calls
from vllm_lite.server.calls.response import MANY_TOKENS, as_error, beside_the_loop
from vllm_lite.server.openai.errors import ApiError
from vllm_lite.server.responses.event_log import EventLog
from vllm_lite.server.responses.output import Output
from vllm_lite.server.responses.store import ResponseStore, StoredResponse

CLOSE_S = 2.0
"""Seconds for cancelled responses to be stored at shutdown."""

logger = log.get(__name__)


class Sender(NamedTuple):
    """Owner and holder of a response, as in StoredResponse, and the bytes of the body kept until its end."""

    owner: str
    holder: str
    kept_bytes: int


class Run:
    """One response that is being generated."""

    def __init__(
        self, call: Call, output: Output, items: bytes, log: EventLog | None, sender: Sender, *, is_kept: bool
    ) -> None:
        """`items` are the request's own input items, as JSON. If `is_kept`, the response is stored at its end."""
        self.id = call.id
        self.name = call.name
        self.call = call
        self.output = output
        self.items = items
        self.log = log
        self.sender = sender
        self.is_kept = is_kept
        self.is_background = bool(output.response["background"])
        self.error: ApiError | None = None
        self.was_cancelled = False
        self.was_deleted = False
        self.num_readers = 0
        self.began: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the engine has accepted or refused the request."""
        self.task: asyncio.Task[None]
        self.expiry: asyncio.TimerHandle | None = None

    @property
    def owner(self) -> str:
        return self.sender.owner

    @property
    def response(self) -> bytes:
        return msgspec.json.encode(self.output.response)

    def record(self, events: bytes = b"") -> StoredResponse:
        first = self.log.first if self.log is not None else 0
        previous = self.output.response["previous_response_id"]
        status, kept = self.output.response["status"], (self.response, self.items, events, first)
        owner, holder, _ = self.sender
        return StoredResponse(self.name, owner, previous, self.is_background, *kept, holder, status)


class Runs:
    """The responses that this server generates. Every method is called on the loop."""

    def __init__(self, calls: Calls, store: ResponseStore, resume_s: float, release: Callable[[int], None]) -> None:
        """A streamed response without a reader for `resume_s` is cancelled, unless it runs in the background. `release`
        is called with the bytes that a run kept until its end."""
        self._calls = calls
        self._store = store
        self._resume_s = resume_s
        self._release = release
        self._runs: dict[str, Run] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def get(self, name: str) -> Run | None:
        return self._runs.get(name)

    def start(self, run: Run) -> None:
        """Start a response. Raises ApiError if it cannot be started."""
        try:
            self._calls.start(run.call)
        except ApiError:
            self._release(run.sender.kept_bytes)
            raise
        self._runs[run.name] = run
        run.output.begin()
        if run.log is not None:
            run.log.wake()
        run.task = asyncio.create_task(self._generate(run))

    def cancel(self, run: Run) -> None:
        """Cancel a response, which keeps its output so far."""
        run.was_cancelled = True
        run.call.reading.end()

    def attach(self, run: Run) -> Callable[[], None]:
        """Add a reader. Returns the function to call when it disconnects."""
        run.num_readers += 1
        if run.expiry is not None:
            run.expiry.cancel()
            run.expiry = None
        return partial(self._detach, run)

    def _detach(self, run: Run) -> None:
        run.num_readers -= 1
        if run.num_readers or run.is_background or run.task.done():
            return
        if run.log is None or not run.is_kept or not self._resume_s:
            self.cancel(run)
        else:
            run.expiry = asyncio.get_running_loop().call_later(self._resume_s, self.cancel, run)

    async def close(self) -> None:
        """Cancel all responses, and wait until they are stored."""
        for run in self._runs.values():
            self.cancel(run)
        tasks = [run.task for run in self._runs.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)

    async def _generate(self, run: Run) -> None:
        try:
            try:
                await self._take_deltas(run)
            except Exception:  # the response fails with this error
                logger.exception("response %s failed", run.id)
                run.error = ApiError(500, "the server failed; its log says why")
            finally:
                self._calls.end(run.call)
            self._finish(run)
            if run.is_kept and not _was_refused(run):
                await self._keep(run)
        finally:
            if run.expiry is not None:
                run.expiry.cancel()
            self._runs.pop(run.name, None)
            self._release(run.sender.kept_bytes)
            if run.log is not None:
                run.log.close()
            if not run.began.done():
                run.began.set_result(None)

    async def _take_deltas(self, run: Run) -> None:
        call, reading = run.call, run.call.reading
        while True:
            await reading.wait()
            ended = call.has_ended or call.was_cut or reading.is_over
            deltas = [delta for _, delta in reading.deltas()]
            reading.sent_s = time.monotonic()
            for delta in deltas:
                if len(delta.logprobs or ()) > MANY_TOKENS:
                    await beside_the_loop(partial(run.output.feed, delta))
                else:
                    run.output.feed(delta)
            if run.log is not None:
                run.log.wake()
            if ended:
                return
            if not run.began.done():
                run.began.set_result(None)

    def _finish(self, run: Run) -> None:
        call, output = run.call, run.output
        cached, count = call.num_cached_tokens, output.num_tokens
        usage = {
            "input_tokens": call.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": count,
            "output_tokens_details": {"reasoning_tokens": output.num_reasoning},
            "total_tokens": call.num_prompt_tokens + count,
        }
        if run.error is None and not run.was_cancelled and (call.error is not None or call.was_cut):
            run.error = as_error(call)
        reason = call.streams[0].samples[0].finish_reason
        if run.error is not None:
            code = "invalid_prompt" if run.error.status in (400, 408) else "server_error"
            output.finish("failed", usage, error={"code": code, "message": run.error.message})
        elif run.was_cancelled or (reason == "abort" and not self._calls.is_draining):
            output.finish("cancelled", usage)
        elif reason == "length":
            output.finish("incomplete", usage, incomplete_details={"reason": "max_output_tokens"})
        elif reason == "abort":
            error = {"code": "server_error", "message": "the server shut down before the response was complete"}
            output.finish("failed", usage, error=error)
        else:
            output.finish("completed", usage)

    async def _keep(self, run: Run) -> None:
        events = b"" if run.log is None else await asyncio.to_thread(run.log.packed)
        if run.was_deleted:  # meanwhile
            return
        try:
            await self._store.put(run.record(events))
        except ApiError as error:  # its client has the answer, unstored
            logger.error("response %s is not kept: %s", run.id, error.message)


def _was_refused(run: Run) -> bool:
    """Whether the request was answered with an HTTP error, so that no client knows the response."""
    return run.error is not None and not run.is_background and not run.call.has_begun
