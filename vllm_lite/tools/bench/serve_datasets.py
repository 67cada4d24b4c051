"""The requests of `bench serve`: random tokens, shared prefixes, conversations, or prompts from a file. Lengths are in
tokens. The same seed makes the same requests."""

import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.errors import ConfigError

PLAIN_IDS = (5, 1000)
"""The range of random token ids without a tokenizer, which every vocabulary has."""
MAX_TRIES = 16
"""Attempts to cut or extend a random text to the wanted number of tokens."""
SHAREGPT_MIN, SHAREGPT_MAX_INPUT, SHAREGPT_MAX_TOTAL = 4, 1024, 2048
"""Conversations outside these lengths are skipped, as in vLLM's benchmark, so that results can be compared."""


class LoadItem(msgspec.Struct, frozen=True):
    """One request of the load. `prompt` is a text or token ids; `input_len` is its number of tokens, 0 if it is unknown
    for lack of a tokenizer.

    A request with `after` continues the conversation of the request with that index: it is sent `wait_s` after that
    one's answer has ended, and its prompt is preceded by that prompt and answer, whose tokens `input_len` includes.
    """

    prompt: str | list[int]
    input_len: int
    output_len: int
    after: int | None = None
    wait_s: float = 0.0

    def behind(self, prompt: str | list[int], answer: str | list[int]) -> "LoadItem":
        """The request with the earlier prompt and answer before its own."""
        if isinstance(self.prompt, str):
            whole: str | list[int] = f"{prompt}{answer}{self.prompt}"
        else:
            whole = [*prompt, *answer, *self.prompt]
        return msgspec.structs.replace(self, prompt=whole, after=None)


class DatasetOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of the same names."""

    dataset_name: str = "random"
    dataset_path: str | None = None
    num_prompts: int = 1000
    seed: int = 0
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    random_prefix_len: int = 0
    prefix_repetition_prefix_len: int = 256
    prefix_repetition_suffix_len: int = 256
    prefix_repetition_num_prefixes: int = 10
    prefix_repetition_output_len: int = 128
    sharegpt_output_len: int | None = None
    custom_output_len: int = 256
    chat_turns: int | None = None
    chat_prefix_len: int | None = None
    chat_message_len: int | None = None
    chat_output_len: int | None = None
    chat_wait: float | None = None


class Talk(NamedTuple):
    """Parameters of conversations: number of requests, tokens of their common prefix, and the means of output tokens,
    tokens of a message, and seconds from an answer to the next message."""

    turns: int
    prefix_len: int
    output_len: int
    message_len: int
    wait: float


TALKS = {
    "chats": Talk(turns=4, prefix_len=256, output_len=128, message_len=64, wait=8.0),
    "agents": Talk(turns=8, prefix_len=1500, output_len=48, message_len=250, wait=0.5),
}
"""Defaults of the flags: people who read and type, and programs that call tools with long results."""
TALK_RATIO = 0.5
"""Lengths of messages vary by up to this fraction in both directions."""


class _Turn(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []


class _Line(msgspec.Struct):
    prompt: str | list[int]
    output_tokens: int | None = None


class RandomPrompts:
    """Makes prompts of random tokens: texts with a tokenizer, else token ids."""

    def __init__(self, rng: random.Random, tokenizer: Tokenizer | None) -> None:
        self._rng = rng
        self._tokenizer = tokenizer
        special = frozenset() if tokenizer is None else tokenizer.special_ids
        ids = range(*PLAIN_IDS) if tokenizer is None else range(tokenizer.vocab_size)
        self._ids = [token_id for token_id in ids if token_id not in special]

    def ids(self, length: int) -> list[int]:
        return self._rng.choices(self._ids, k=length)

    def prompt(self, ids: list[int]) -> tuple[str | list[int], int]:
        """Make a prompt from `ids`, and return its length. Few random ids survive decoding and encoding, so tokens are
        added or cut at the end until the number is that of `ids`; if that fails, it is close."""
        if self._tokenizer is None:
            return ids, len(ids)
        wanted = len(ids)
        best, text = ids, ""
        for attempt in range(MAX_TRIES):
            text = self._tokenizer.decode(best)
            best = self._tokenizer.encode(text, add_special_tokens=False)
            if len(best) == wanted:
                break
            best = best[: max(wanted - attempt, 0)]  # the same end may fail again: replace more of it
            best += self.ids(wanted - len(best))
        return text, len(self._tokenizer.encode(text, add_special_tokens=False))


def make_requests(options: DatasetOptions, tokenizer: Tokenizer | None) -> list[LoadItem]:
    """Make `options.num_prompts` requests, or as many as the file has. Raises ConfigError."""
    maker = MAKERS[options.dataset_name]
    requests = list(islice(maker(options, random.Random(options.seed), tokenizer), options.num_prompts))
    if not requests:
        name = options.dataset_path or options.dataset_name
        raise ConfigError(f"the dataset {name} holds no request that can be used")
    return requests


def _random(options: DatasetOptions, rng: random.Random, tokenizer: Tokenizer | None) -> Iterator[LoadItem]:
    prompts = RandomPrompts(rng, tokenizer)
    prefix = prompts.ids(options.random_prefix_len)
    for _ in range(options.num_prompts):
        num_own = _around(rng, options.random_input_len, options.random_range_ratio)
        output_len = _around(rng, options.random_output_len, options.random_range_ratio)
        yield LoadItem(*prompts.prompt(prefix + prompts.ids(num_own)), output_len)


def _around(rng: random.Random, length: int, ratio: float) -> int:
    """Uniform between length * (1 - ratio) and length * (1 + ratio)."""
    return max(rng.randint(int(length * (1 - ratio)), int(length * (1 + ratio))), 1)


def _prefix_repetition(options: DatasetOptions, rng: random.Random, tokenizer: Tokenizer | None) -> Iterator[LoadItem]:
    num_prefixes = options.prefix_repetition_num_prefixes
    if num_prefixes > options.num_prompts:
        raise ConfigError(f"{num_prefixes} prefixes need at least as many prompts, got {options.num_prompts}")
    prompts = RandomPrompts(rng, tokenizer)
    prefixes = [prompts.ids(options.prefix_repetition_prefix_len) for _ in range(num_prefixes)]
    order = [place % num_prefixes for place in range(options.num_prompts)]
    rng.shuffle(order)
    for which in order:
        ids = prefixes[which] + prompts.ids(options.prefix_repetition_suffix_len)
        yield LoadItem(*prompts.prompt(ids), options.prefix_repetition_output_len)


def _talks(options: DatasetOptions, rng: random.Random, tokenizer: Tokenizer | None) -> Iterator[LoadItem]:
    """Conversations, one after another; only the first request of each has a send time."""
    given = {name: getattr(options, f"chat_{name}") for name in Talk._fields}
    talk = TALKS[options.dataset_name]._replace(**{name: value for name, value in given.items() if value is not None})
    prompts = RandomPrompts(rng, tokenizer)
    prefix = prompts.ids(talk.prefix_len)
    for first in range(0, options.num_prompts, talk.turns):
        num_tokens, begins = 0, prefix
        for turn in range(talk.turns):
            prompt, length = prompts.prompt(begins + prompts.ids(_around(rng, talk.message_len, TALK_RATIO)))
            output_len = _around(rng, talk.output_len, TALK_RATIO)
            num_tokens, begins = num_tokens + length, []
            if turn:
                wait_s = rng.expovariate(1 / talk.wait) if talk.wait else 0.0
                yield LoadItem(prompt, num_tokens, output_len, first + turn - 1, wait_s)
            else:
                yield LoadItem(prompt, num_tokens, output_len)
            num_tokens += output_len


def _sharegpt(options: DatasetOptions, rng: random.Random, tokenizer: Tokenizer | None) -> Iterator[LoadItem]:
    """The first question of each conversation; the output length is that of its first answer."""
    talks = _decode(options, _conversations)
    if tokenizer is None and options.sharegpt_output_len is None:
        raise ConfigError(
            "the lengths of ShareGPT's answers need a tokenizer; give --tokenizer or --sharegpt-output-len"
        )
    talks = [talk for talk in talks if len(talk.conversations) >= 2]
    rng.shuffle(talks)
    for talk in talks:
        question, answer = (turn.value for turn in talk.conversations[:2])
        if tokenizer is None:
            yield LoadItem(question, 0, options.sharegpt_output_len or 0)
            continue
        input_len = len(tokenizer.encode(question, add_special_tokens=False))
        output_len = options.sharegpt_output_len or len(tokenizer.encode(answer, add_special_tokens=False))
        is_short = output_len < SHAREGPT_MIN and options.sharegpt_output_len is None
        is_long = input_len > SHAREGPT_MAX_INPUT or input_len + output_len > SHAREGPT_MAX_TOTAL
        if input_len >= SHAREGPT_MIN and not is_short and not is_long:
            yield LoadItem(question, input_len, output_len)


def _conversations(data: bytes) -> list[_Conversation]:
    """Parse a JSON array of conversations, or one per line."""
    if data.lstrip()[:1] == b"[":
        return msgspec.json.decode(data, type=list[_Conversation])
    return msgspec.json.Decoder(_Conversation).decode_lines(data)


def _custom(options: DatasetOptions, _: random.Random, tokenizer: Tokenizer | None) -> Iterator[LoadItem]:
    """Read one JSON object per line: "prompt", a text or token ids, and optionally "output_tokens"."""
    for line in _decode(options, msgspec.json.Decoder(_Line).decode_lines):
        ids = line.prompt
        if isinstance(ids, str):
            ids = [] if tokenizer is None else tokenizer.encode(ids, add_special_tokens=False)
        yield LoadItem(line.prompt, len(ids), line.output_tokens or options.custom_output_len)


def _decode(options: DatasetOptions, decode: Callable[[bytes], list[Any]]) -> list[Any]:
    """Read and decode the file of the dataset. Raises ConfigError."""
    if options.dataset_path is None:
        raise ConfigError(f"the dataset {options.dataset_name} is read from a file; give --dataset-path FILE")
    try:
        return decode(Path(options.dataset_path).read_bytes())
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{options.dataset_path} cannot be read as {options.dataset_name}: {error}") from error


MAKERS: dict[str, Callable[[DatasetOptions, random.Random, Tokenizer | None], Iterator[LoadItem]]] = {
    "random": _random,
    "sharegpt": _sharegpt,
    "prefix_repetition": _prefix_repetition,
    "custom": _custom,
    "chats": _talks,
    "agents": _talks,
}
