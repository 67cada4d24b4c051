"""Many requests at once: from a batch file to a server, its answers into another file."""

import asyncio
import os
from collections.abc import Callable, Iterator
from typing import Any, Self

import httpx

from vllm_lite.tools.chat import batch_file
from vllm_lite.tools.chat.batch_file import Bad, BatchRequest, BatchResults
from vllm_lite.tools.chat.remote_server import Address, check, client_settings, lost

BUSY = (429, 503)
MAX_TRIES = 8
MAX_PAUSE_S = 30.0


class BatchRun:
    """One run over a batch file. It counts what this run did; `num_before` counts what earlier runs did."""

    def __init__(
        self,
        results: BatchResults,
        progress: Callable[["BatchRun"], None] = lambda _: None,
        complain: Callable[[Bad], None] = lambda _: None,
    ) -> None:
        """`progress` is called after every line, `complain` for a line that is no request."""
        self.num_before = len(results.done)
        self.num_lines = 0
        self.num_answered = 0
        self.num_failed = 0
        self.num_bad = 0
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self._results = results
        self._progress = progress
        self._complain = complain
        self._already = frozenset(results.done)

    async def run(
        self, entries: Iterator[BatchRequest | Bad], http: "Server", max_concurrency: int, model: str | None = None
    ) -> None:
        """Send all `entries`; `model` is for bodies that name none. Raises RemoteError when the server has gone; the
        answers until then are in the file."""
        tasks = [asyncio.ensure_future(self._work(entries, http, model)) for _ in range(max_concurrency)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, entries: Iterator[BatchRequest | Bad], http: "Server", model: str | None) -> None:
        """Send entries one after the other. Several of these tasks share the iterator."""
        for entry in entries:
            if entry.custom_id not in self._already:
                if isinstance(entry, Bad):
                    self._refuse(entry)
                else:
                    default = {} if model is None else {"model": model}
                    self._record(*await http.ask(entry, {**default, **entry.body}), entry)
            self.num_lines += 1
            self._progress(self)

    def _refuse(self, entry: Bad) -> None:
        self.num_bad += 1
        self._complain(entry)
        if entry.custom_id is not None:
            self._results.append(batch_file.failure(entry.custom_id, entry.code, entry.message))

    def _record(self, status: int, request_id: str, body: Any, entry: BatchRequest) -> None:
        self._results.append(batch_file.answer(entry.custom_id, status, request_id, body))
        if status != httpx.codes.OK:
            self.num_failed += 1
            return
        self.num_answered += 1
        usage = body.get("usage") if isinstance(body, dict) else None
        self.num_prompt_tokens += (usage or {}).get("prompt_tokens") or 0
        self.num_output_tokens += (usage or {}).get("completion_tokens") or 0


class Server:
    """The server, over as many connections as are needed. An asynchronous context manager."""

    def __init__(
        self, address: Address, api_key: str | None, timeout_s: float, why: Callable[[], str | None] = lambda: None
    ) -> None:
        """`timeout_s` is for one answer; `why()` says why a server cannot be reached, if known."""
        self._address = address
        self._why = why
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        settings = client_settings(address, api_key, timeout_s)
        transport = None if address.uds is None else httpx.AsyncHTTPTransport(uds=address.uds, limits=limits)
        self._http = httpx.AsyncClient(transport=transport, limits=limits, **settings)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ask(self, request: BatchRequest, body: dict[str, Any]) -> tuple[int, str, Any]:
        """Return status, request id and body of the answer, retrying while the server is busy. Raises RemoteError."""
        for attempt in range(MAX_TRIES):
            try:
                response = await self._http.post(request.url, json=body)
            except httpx.HTTPError as error:
                raise lost(self._address, error, self._why()) from error
            if response.status_code not in BUSY or attempt == MAX_TRIES - 1:
                break
            await asyncio.sleep(pause_s(response, attempt))
        if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            check(self._address, response.status_code, response.content)  # the next would fare no better
        try:
            content = response.json()
        except ValueError:
            content = {"error": {"message": response.text[:1000], "code": response.status_code}}
        return response.status_code, response.headers.get("x-request-id") or f"req_{os.urandom(12).hex()}", content


def pause_s(response: httpx.Response, attempt: int) -> float:
    retry_after = response.headers.get("retry-after", "")
    return min(float(retry_after) if retry_after.isdecimal() else 0.5 * 2**attempt, MAX_PAUSE_S)
