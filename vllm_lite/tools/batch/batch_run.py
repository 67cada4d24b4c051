"""Sends the rows of a batch to a server concurrently, and stores the answers."""

import asyncio
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Self

import httpx
import msgspec

from vllm_lite.tools.batch import rows
from vllm_lite.tools.batch.batch_results import BatchResults, Totals
from vllm_lite.tools.batch.journal import RecordKind
from vllm_lite.tools.batch.rows import Bad, BatchRequest, Entry
from vllm_lite.tools.chat.remote_server import Address, check, client_settings, lost, no_tls

BUSY = (429, 503)
MAX_TRIES = 8
MAX_PAUSE_S = 30.0
RECONNECT_S = (0.0, 0.3, 1.0)
"""Pauses before a request is sent again after its connection broke, because the server lost one of its processes."""


class BatchRun:
    """One process's work on a batch."""

    def __init__(
        self,
        results: BatchResults,
        progress: Callable[["BatchRun"], None] = lambda _: None,
        complain: Callable[[Bad], None] = lambda _: None,
    ) -> None:
        """`progress` is called after every row, `complain` for each bad row."""
        self.before = replace(results.totals)
        """Rows and tokens of earlier processes."""
        self._results = results
        self._progress = progress
        self._complain = complain

    @property
    def own(self) -> Totals:
        """Rows and tokens of this process."""
        return self._results.totals.since(self.before)

    @property
    def num_done(self) -> int:
        """Rows of this and earlier processes."""
        return self._results.totals.num_rows

    async def run(
        self, entries: Iterator[Entry], http: "Server", max_concurrency: int, model: str | None = None
    ) -> None:
        """Send all `entries`; `model` is the default of their bodies. Raises RemoteError if the server is gone; the
        answers so far are stored."""
        tasks = [asyncio.ensure_future(self._work(entries, http, model)) for _ in range(max_concurrency)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, entries: Iterator[Entry], http: "Server", model: str | None) -> None:
        """Send entries one after another. Several of these tasks share the iterator."""
        for entry in entries:
            if isinstance(entry, Bad):
                self._refuse(entry)
            else:
                default = {} if model is None else {"model": model}
                self._record(*await http.ask(entry, {**default, **entry.body}), entry)
            self._progress(self)

    def _refuse(self, entry: Bad) -> None:
        self._results.append(entry.line, RecordKind.BAD, rows.failure(entry))
        self._complain(entry)

    def _record(self, status: int, request_id: str, body: Any, entry: BatchRequest) -> None:
        answer = rows.answer(entry.custom_id, status, request_id, body)
        if status != httpx.codes.OK:
            self._results.append(entry.line, RecordKind.FAILED, answer)
        else:
            self._results.append(entry.line, RecordKind.ANSWERED, answer, _tokens(body))


def _tokens(body: Any) -> tuple[int, int, int]:
    """Prompt, cached and output tokens of the answer's `usage`."""
    usage = body.get("usage") if isinstance(body, dict) else None
    if not isinstance(usage, dict):
        return 0, 0, 0
    details = usage.get("prompt_tokens_details")
    found = (
        usage.get("prompt_tokens"),
        details.get("cached_tokens") if isinstance(details, dict) else 0,
        usage.get("completion_tokens"),
    )
    prompt, cached, output = (number if isinstance(number, int) and number > 0 else 0 for number in found)
    return prompt, cached, output


class Server:
    """The server, over any number of connections. An asynchronous context manager."""

    def __init__(
        self, address: Address, api_key: str | None, timeout_s: float, why: Callable[[], str | None] = lambda: None
    ) -> None:
        """`timeout_s` bounds one answer; `why()` returns the reason why the server cannot be reached, if known."""
        self._address = address
        self._why = why
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        settings = client_settings(address, api_key, timeout_s)
        transport = (
            None if address.uds is None else httpx.AsyncHTTPTransport(uds=address.uds, limits=limits, verify=no_tls())
        )
        self._http = httpx.AsyncClient(transport=transport, limits=limits, **settings)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ask(self, request: BatchRequest, body: dict[str, Any]) -> tuple[int, str, Any]:
        """Return status, request id and body of the answer, retrying while the server is busy. Raises RemoteError."""
        content = msgspec.json.encode(body)
        for attempt in range(MAX_TRIES):
            response = await self._post(request.url, content)
            if response.status_code not in BUSY or attempt == MAX_TRIES - 1:
                break
            await asyncio.sleep(pause_s(response, attempt))
        if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            check(self._address, response.status_code, response.content)  # other requests would fail, too
        try:
            answer = msgspec.json.decode(response.content)
        except (msgspec.DecodeError, ValueError, RecursionError):
            answer = {"error": {"message": response.text[:1000], "code": response.status_code}}
        return response.status_code, response.headers.get("x-request-id") or f"req_{os.urandom(12).hex()}", answer

    async def _post(self, url: str, content: bytes) -> httpx.Response:
        """Send a request, and repeat it if the connection breaks while the server can be reached. Raises
        RemoteError."""
        pauses = iter(RECONNECT_S)
        while True:
            try:
                return await self._http.post(url, content=content, headers={"Content-Type": "application/json"})
            except httpx.TimeoutException as error:
                raise lost(self._address, error, self._why()) from error
            except httpx.HTTPError as error:
                pause = next(pauses, None)
                if pause is None or self._why() is not None:
                    raise lost(self._address, error, self._why()) from error
                await asyncio.sleep(pause)


def pause_s(response: httpx.Response, attempt: int) -> float:
    retry_after = response.headers.get("retry-after", "")
    return min(float(retry_after) if retry_after.isdecimal() else 0.5 * 2**attempt, MAX_PAUSE_S)
