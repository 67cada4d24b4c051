"""`vllm-lite bench serve`: sends load to any OpenAI-compatible server and measures its latencies and throughput.

serve_datasets.py  the requests
serve_http.py      HTTP and event streams
serve_client.py    one request, and the times of its answer
serve_result.py    metrics and table
serve_plot.py      the figure

Requests are sent at the times of a Poisson process (or, with burstiness, a gamma process), whether or not earlier ones
have ended, but never more than `max_concurrency` at once.
"""

import asyncio
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from vllm_lite.client.progress import TokenBar
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.client.text.tokenizer_formats import conversion
from vllm_lite.errors import ConfigError
from vllm_lite.runtime.machine import allow_files
from vllm_lite.tools.bench.serve_client import ENDPOINTS, Endpoint, Outcome
from vllm_lite.tools.bench.serve_datasets import DatasetOptions, LoadItem, make_requests
from vllm_lite.tools.bench.serve_http import HttpClient, HttpError
from vllm_lite.tools.bench.serve_result import DETAILS, summarize

PROBES = 8
Report = Callable[[Outcome], None]


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of the same names."""

    dataset: DatasetOptions = DatasetOptions()
    fit_s: float | None = None
    """Send fewer requests if all of them would take longer than this; None sends all."""
    backend: str = "openai"
    base_url: str = "http://127.0.0.1:8000"
    endpoint: str | None = None
    model: str | None = None
    served_model_name: str | None = None
    tokenizer: str | None = None
    request_rate: float = float("inf")
    burstiness: float = 1.0
    max_concurrency: int | None = None
    num_warmups: int = 0
    percentiles: tuple[float, ...] = (99.0,)
    goodput: dict[str, float] = {}
    sampling: dict[str, Any] = {}
    """Further fields of a request's body."""
    headers: dict[str, str] = {}
    insecure: bool = False
    request_timeout_s: float = 6 * 3600.0
    show_progress: bool = False


class _Detokenized(msgspec.Struct):
    """The answer of /detokenize."""

    prompt: str


class ServeRun(msgspec.Struct, frozen=True):
    """`result` has vLLM's keys; `cpu_s` is this client's CPU time during the measurement."""

    result: dict[str, Any]
    served: list[Outcome]
    cpu_s: float


def run(options: ServeOptions) -> ServeRun:
    """Run the benchmark. Raises ConfigError for impossible options, HttpError if neither they nor the server name a
    model."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(options))


async def _run(options: ServeOptions) -> ServeRun:
    endpoint = options.endpoint or ENDPOINTS[options.backend]
    tokenizer = load_tokenizer(options)
    requests = make_requests(options.dataset, tokenizer)
    are_talks = any(request.after is not None for request in requests)
    if are_talks and options.backend == "openai-chat":
        raise ConfigError(f"{options.dataset.dataset_name} are prompts that grow; send them to --backend openai")
    allow_files(len(requests) + 64)  # each running request is a connection
    client = HttpClient(options.base_url, options.headers, check_tls=not options.insecure)
    try:
        model = options.served_model_name or options.model or await Endpoint(client, endpoint, {}, timeout_s=0).model()
        if endpoint.endswith("chat/completions"):
            requests = [await _as_text(client, model, request) for request in requests]
        ids = {"return_token_ids": True} if are_talks and isinstance(requests[0].prompt, list) else {}
        settings = {"model": model, **ids, **options.sampling}
        api = Endpoint(client, endpoint, settings, timeout_s=options.request_timeout_s)
        if options.num_warmups:
            warmups = [requests[place % len(requests)] for place in range(options.num_warmups)]
            await drive(api, warmups, [0.0] * len(warmups), options.max_concurrency, lambda _: None)
        if options.fit_s is not None and not are_talks:
            requests = requests[: await fitting(api, requests, options.request_rate, options.fit_s)]
        times_s = arrivals(len(requests), options.request_rate, options.burstiness, options.dataset.seed)
        cpu_s = time.process_time()
        with TokenBar(len(requests), enabled=options.show_progress, has_rate=False) as progress:

            def report(outcome: Outcome) -> None:
                progress.tokens(outcome.output_len)
                progress.request()

            outcomes, duration_s = await drive(api, requests, times_s, options.max_concurrency, report)
        cpu_s = time.process_time() - cpu_s
    finally:
        client.close()
    count_missing_usage(outcomes, tokenizer)
    result = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": options.backend,
        "backend": options.backend,
        "model_id": options.model or model,
        "tokenizer_id": options.tokenizer or options.model or model,
        "num_prompts": len(requests),
        "request_rate": "inf" if options.request_rate == float("inf") else options.request_rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        **summarize(outcomes, duration_s, options.percentiles, options.goodput),
    }
    return ServeRun(result, [outcome for outcome in outcomes if not outcome.error], cpu_s)


async def _as_text(client: HttpClient, model: str, request: LoadItem) -> LoadItem:
    """A chat needs text: the server detokenizes a prompt of token ids, whose tokens are then counted by its usage.
    Raises ConfigError for a server that cannot."""
    if isinstance(request.prompt, str):
        return request
    body = msgspec.json.encode({"model": model, "tokens": request.prompt})
    try:
        text = msgspec.json.decode(await client.post("/detokenize", body), type=_Detokenized).prompt
    except (HttpError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        text = f"a chat is made of text, these prompts are token ids, and the server's /detokenize fails ({error})"
        raise ConfigError(f"{text}; give --tokenizer FOLDER") from error
    return msgspec.structs.replace(request, prompt=text, input_len=0)


def load_tokenizer(options: ServeOptions) -> Tokenizer | None:
    """Load the tokenizer of --tokenizer, or of a model that is a local folder. Raises ModelError."""
    if options.tokenizer is not None:
        return Tokenizer.load(options.tokenizer)
    if options.model is not None and conversion.has_tokenizer(options.model):
        return Tokenizer.load(options.model)
    return None


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Send times of requests, in seconds after the start. Gaps have a gamma distribution with the shape `burstiness`
    (1: Poisson), scaled so that the last request is sent after count / rate seconds."""
    if rate == float("inf"):
        return [0.0] * count
    rng = random.Random(seed)
    times = list(accumulate(rng.gammavariate(burstiness, 1.0) for _ in range(count)))
    stretch_s = count / rate / times[-1] if times[-1] > 0 else 0.0
    return [time * stretch_s for time in times]


async def drive(
    api: Endpoint, requests: Sequence[LoadItem], times_s: Sequence[float], max_concurrency: int | None, report: Report
) -> tuple[list[Outcome], float]:
    """Send each request at its time, or after the one that it continues. Returns the outcomes in the order of requests,
    and the total seconds."""
    places = asyncio.Semaphore(max_concurrency or len(requests))

    sent = list[LoadItem](requests)

    async def send(number: int) -> Outcome:
        request = requests[number]
        if request.after is not None:
            before = await tasks[request.after]
            answer = before.text if isinstance(request.prompt, str) else before.token_ids
            has_no_ids = not answer and not isinstance(request.prompt, str)
            if before.error or has_no_ids:
                report(outcome := before.unanswered())
                return outcome
            await asyncio.sleep(request.wait_s)
            request = sent[number] = request.behind(sent[request.after].prompt, answer)
        async with places:
            outcome = await api.send(request)
        report(outcome)
        return outcome

    tasks = list["asyncio.Task[Outcome]"]()
    start_s = time.perf_counter()
    for number, time_s in enumerate(times_s):
        wait_s = start_s + time_s - time.perf_counter()
        if wait_s > 0 and requests[number].after is None:
            await asyncio.sleep(wait_s)
        tasks.append(asyncio.ensure_future(send(number)))
    outcomes = await asyncio.gather(*tasks)
    return outcomes, time.perf_counter() - start_s


async def fitting(api: Endpoint, requests: Sequence[LoadItem], request_rate: float, fit_s: float) -> int:
    """Return the number of `requests` that can be served in about `fit_s`, estimated from a few of the last ones.
    Prints it if that is not all of them."""
    rate = 0.0
    for count in (1, PROBES):
        outcomes, taken_s = await drive(api, requests[-count:], [0.0] * count, None, lambda _: None)
        if any(outcome.error for outcome in outcomes):
            return len(requests)  # the run will report the error
        rate = min(count / taken_s, request_rate)
        if len(requests) <= rate * fit_s:
            return len(requests)
    fitting = min(len(requests), max(PROBES, round(rate * fit_s)))
    print(
        f"{len(requests)} requests would take about {len(requests) / rate / 60:.0f} minutes here: {fitting} are sent; "
        "--num-prompts sends as many as it says",
        file=sys.stderr,
    )
    return fitting


def count_missing_usage(outcomes: Sequence[Outcome], tokenizer: Tokenizer | None) -> None:
    """Count the output tokens of outcomes without usage from the server: with the tokenizer, or else by chunks."""
    for outcome in outcomes:
        if not outcome.error and not outcome.output_len:
            counted = tokenizer.encode(outcome.text, add_special_tokens=False) if tokenizer is not None else []
            outcome.output_len = len(counted) or len(outcome.chunks_s)


def save(result: dict[str, Any], path: str, *, detailed: bool) -> None:
    """Write the result as JSON. Raises ConfigError if it cannot be written."""
    kept = {name: value for name, value in result.items() if detailed or name not in DETAILS}
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=2 if not detailed else 0))
    except OSError as error:
        raise ConfigError(f"the result cannot be written to {path}: {error}") from error


def file_name(result: dict[str, Any], label: str | None) -> str:
    """The file name that vLLM's benchmark would use."""
    concurrency = f"-concurrency{result['max_concurrency']}" if result["max_concurrency"] is not None else ""
    name = str(result["model_id"]).rstrip("/").rsplit("/", 1)[-1]
    return f"{label or result['backend']}-{result['request_rate']}qps{concurrency}-{name}-{result['date']}.json"
