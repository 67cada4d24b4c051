"""The requests of a simulation and the times at which they are sent: from `bench serve`'s flags, or from a trace."""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.errors import ConfigError
from vllm_lite.tools.bench.serve import arrivals
from vllm_lite.tools.bench.serve_datasets import DatasetOptions, make_requests
from vllm_lite.tools.simulate.recording import RecordedRequest, Recording

TOKEN_BYTES = 3
TOKEN_BITS = 8 * TOKEN_BYTES
"""Bits of a token id in a simulation; block digests are cut into such token ids."""


class SimulatedRequest(NamedTuple):
    """A request that is sent at `time_s`, or later if the maximum number of requests runs then. `tokens`: u32 ids.

    With `after`, it continues the request with that index: it is sent `time_s` after the end of that request, and its
    `tokens` follow the prompt and the answer of that request.
    """

    time_s: float
    tokens: bytes
    output_len: int
    after: int | None = None
    adapter: int = 0
    """Number of the request's adapter; 0: none."""


class LoadOptions(NamedTuple):
    """Values of the flags with these names."""

    dataset: DatasetOptions
    request_rate: float = float("inf")
    burstiness: float = 1.0
    max_concurrency: int | None = None


def make_load(options: LoadOptions, tokenizer: Tokenizer | None) -> list[SimulatedRequest]:
    """The requests that `bench serve` would send with the same flags. Raises ConfigError."""
    items = make_requests(options.dataset, tokenizer)
    times_s = arrivals(len(items), options.request_rate, options.burstiness, options.dataset.seed)
    load = list[SimulatedRequest]()
    for item, time_s in zip(items, times_s, strict=True):
        ids = item.prompt
        if isinstance(ids, str):
            if tokenizer is None:
                raise ConfigError("texts have no tokens without a tokenizer; give --tokenizer FOLDER")
            ids = tokenizer.encode(ids)
        at_s = time_s if item.after is None else item.wait_s
        load.append(SimulatedRequest(at_s, array("I", ids).tobytes(), item.output_len, item.after))
    return load


def load_of(recording: Recording) -> list[SimulatedRequest]:
    """The requests of a recording that were served to their ends. Their prompts have the same common prefixes as the
    recorded ones. Raises ConfigError if there are none."""
    ended = [each for each in recording.requests.values() if each.outcome.output_len and not each.outcome.error]
    if not ended:
        raise ConfigError("the trace holds no request that has ended")
    first_s, size = ended[0].outcome.start_s, recording.reader.header.block_size
    return [
        SimulatedRequest(
            each.outcome.start_s - first_s,
            _tokens(each, number, size).tobytes(),
            each.outcome.output_len,
            adapter=each.adapter,
        )
        for number, each in enumerate(ended)
    ]


def _tokens(request: RecordedRequest, number: int, block_size: int) -> "array[int]":
    """Tokens for a prompt: blocks with equal digests get equal tokens; the rest has the number of the request."""
    tokens = array("I", [number % (1 << TOKEN_BITS)]) * request.outcome.input_len
    for place, digest in enumerate(request.block_digests):
        parts = [int.from_bytes(digest[at : at + TOKEN_BYTES], "little") for at in range(0, len(digest), TOKEN_BYTES)]
        block = (parts + [0] * block_size)[:block_size]
        tokens[place * block_size : (place + 1) * block_size] = array("I", block)
    return tokens


def largest(load: Sequence[SimulatedRequest]) -> int:
    """Maximum tokens of a request together with its answer and the conversation before it."""
    ends = list[int]()
    for each in load:
        ends.append(len(each.tokens) // 4 + each.output_len + (0 if each.after is None else ends[each.after]))
    return max(ends)
