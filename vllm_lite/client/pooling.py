"""Embeddings and scores: prompts in, one message to the engine and one back for each of them. No torch.

PoolingFactory checks and tokenizes a user's input; a PoolingStream is one request, which LLM, AsyncClient and the
server follow like requests that generate.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_lite.client.outputs import RequestMetrics
from vllm_lite.client.prompt import Prompt, PromptLike, check_text, checked_ids, unwrap
from vllm_lite.client.text.pairs import Pair, encode_pair, reranker_prompt
from vllm_lite.client.text.tokenizer import Placed, Tokenizer
from vllm_lite.client.windows import TextPart, joined_rows, mean_vector, windows_of
from vllm_lite.errors import ContextLengthError, PooledLengthError, RequestError, VllmLiteError
from vllm_lite.protocol.api import Finished, Generate, Welcome
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.pooling import TOKEN_TASKS, Pooling, PoolingParams, PoolingTask
from vllm_lite.runtime.nested_settings import LONGEST_TEXT

if TYPE_CHECKING:  # both import the events of streams
    from vllm_lite.client.engines.any_session import AnySession
    from vllm_lite.client.streams.stream import Event

Check = Callable[[], None]
NO_TEXT = "the text is empty; it needs at least one token"
OVERLAP_SHARE = 4
"""By default consecutive windows of a long text share 1 / OVERLAP_SHARE of the context if each token has a result, and
no tokens otherwise."""


@dataclass(slots=True)
class PoolingOutput:
    """The numbers of one request: a vector, a number for each label, or a vector for each token."""

    data: list[Any]


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]


@dataclass(slots=True)
class ClassificationOutput:
    """`probs` has a number for each of the model's labels."""

    probs: list[float]


@dataclass(slots=True)
class ScoringOutput:
    score: float


@dataclass(slots=True)
class PoolingRequestOutput:
    """The result of one request. The type of `outputs` depends on the task."""

    request_id: str
    outputs: Any
    prompt_token_ids: list[int]
    prompt: str | None = None
    num_cached_tokens: int = 0
    finished: bool = True


class PoolingStream:
    """One request from its message to its end. Events after the end are ignored."""

    num_tokens = 0
    """Number of generated tokens, always 0."""
    ends_at_once = True

    def __init__(self, request_id: str, prompt: Prompt, params: SamplingParams, pooling: Pooling) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.pooling = pooling
        self.part: TextPart | None = None
        """Place of this window in a text that is longer than the model takes; None: the request is a whole text."""
        self.placed: Placed | None = None
        """The text's tokens with their places, if entities are requested."""
        self.adapter = ""
        """Name of the request's adapter; empty for none."""
        self.samples = (None,)
        self.finished = False
        self.error: VllmLiteError | None = None
        self.metrics = RequestMetrics(0.0)
        self.num_cached_tokens = 0
        self.data = b""
        """Float32 numbers, once the request has finished without an error."""

    def message(self) -> Generate:
        """Make the message that starts this request in an engine."""
        prompt = pack_tokens(self.prompt.token_ids)
        return Generate(self.request_id, prompt, self.params, pooling=self.pooling, adapter=self.adapter)

    def own_message(self) -> None:
        """Return None: the request is not a fork."""

    def starts_again(self, event: "Event", is_live: Callable[[str], bool]) -> bool:
        """Return False: the request is not a fork."""
        del event, is_live
        return False

    def apply(self, event: "Event") -> None:
        if self.finished:
            return
        if not isinstance(event, Finished):
            if (error := getattr(event, "error", None)) is not None:
                self.error, self.finished = error, True
            return
        self.finished = True
        self.num_cached_tokens = event.num_cached_tokens
        if event.reason == "error":
            self.error = RequestError(event.error or "the engine gave no reason")
        elif event.pooled is None:
            self.error = RequestError("the request was aborted")
        else:
            self.data = event.pooled

    def settle(self, session: "AnySession") -> None:
        """Drop an ended request from the session."""
        if self.finished:
            session.drop(self.request_id, stopped=self.error is None)

    def numbers(self) -> list[float]:
        return array("f", self.data).tolist()

    def rows(self) -> Iterator[list[float]]:
        """Yield the vector of each token."""
        numbers = array("f", self.data)
        size = len(numbers) // len(self.prompt.token_ids)
        return (numbers[start : start + size].tolist() for start in range(0, len(numbers), size))

    def output(self) -> PoolingRequestOutput:
        """Make the result, in the form of the task."""
        task = self.pooling.task
        outputs: Any
        if task in TOKEN_TASKS:
            outputs = PoolingOutput(list(self.rows()))
        elif task == "embed":
            outputs = EmbeddingOutput(self.numbers())
        elif task == "score":
            outputs = ScoringOutput(self.numbers()[0])
        else:
            outputs = ClassificationOutput(self.numbers())
        ids = self.prompt.token_ids
        return PoolingRequestOutput(self.request_id, outputs, ids, self.prompt.text, self.num_cached_tokens)

    next_output = output


def by_text(streams: Iterable[PoolingStream]) -> Iterator[list[PoolingStream]]:
    """Group streams by text: a single one, or those of its windows."""
    own = list[PoolingStream]()
    for stream in streams:
        own.append(stream)
        if stream.part is None or stream.part.is_last:
            yield own
            own = []


def joined(streams: list[PoolingStream]) -> PoolingStream:
    """Join the finished streams of a text's windows to one: rows concatenated, or the mean of vectors, weighted by
    tokens."""
    first, part = streams[0], streams[0].part
    if part is None:
        return first
    whole = PoolingStream(first.request_id, part.whole, first.params, first.pooling)
    whole.placed, whole.adapter, whole.finished = first.placed, first.adapter, True
    whole.num_cached_tokens = sum(stream.num_cached_tokens for stream in streams)
    whole.error = next((stream.error for stream in streams if stream.error is not None), None)
    lengths = [len(stream.prompt.token_ids) for stream in streams]
    if whole.error is not None:
        return whole
    if first.pooling.task in TOKEN_TASKS:
        parts = [(stream.data, stream.part) for stream in streams if stream.part is not None]
        whole.data = joined_rows(parts, lengths)
    else:
        normalizes = first.pooling.use_activation
        whole.data = mean_vector([stream.data for stream in streams], lengths, normalizes=normalizes)
    return whole


class PoolingFactory:
    """Makes streams for one engine. Without a tokenizer prompts are token ids."""

    def __init__(self, limits: Welcome, tokenizer: Tokenizer | None) -> None:
        self.limits = limits
        self.tokenizer = tokenizer

    @property
    def tasks(self) -> tuple[PoolingTask, ...]:
        return self.limits.pooler.tasks

    @property
    def first_task(self) -> PoolingTask:
        return self.tasks[0] if self.tasks else "embed"

    def check_task(self, task: PoolingTask, params: PoolingParams) -> None:
        """Raise RequestError if the model or the params do not support the task."""
        pooler = self.limits.pooler
        if not pooler.tasks:
            text = "makes no vectors, labels or scores: it generates text; start it with --convert embed for vectors"
            raise RequestError(f"the model {self.limits.model!r} {text}")
        if task not in pooler.tasks:
            able = f"it can be asked to {' or '.join(pooler.tasks)}"
            raise RequestError(f"the model {self.limits.model!r} does not support the task {task!r}: {able}")
        dimensions = params.dimensions
        if dimensions is None:
            return
        if task not in ("embed", "token_embed"):
            raise RequestError(f"dimensions are those of vectors, and the task {task!r} gives none")
        if pooler.matryoshka and dimensions not in pooler.matryoshka:
            trained = ", ".join(map(str, pooler.matryoshka))
            raise RequestError(f"dimensions must be one of those that the model was trained for: {trained}")
        if dimensions > pooler.size:
            raise RequestError(f"dimensions must be at most the {pooler.size} of the model, got {dimensions}")

    def make(
        self, prompts: Sequence[PromptLike], params: PoolingParams, task: PoolingTask, ids: Sequence[str]
    ) -> list[PoolingStream]:
        """Check and tokenize prompts, all texts together. A text that is longer than the model takes gets a stream for
        each of its windows, if the task allows that. Raises RequestError."""
        self.check_task(task, params)
        wire, kept = _wire_params(params), self._num_kept(params)
        longest = self._longest(task, kept)
        found: list[Prompt] = []
        texts: list[tuple[int, str]] = []
        for place, given in enumerate(prompts):
            plain, text = unwrap(given)
            if isinstance(plain, str):
                with_place = _place(place, len(prompts))
                self._check_text(plain, wire, with_place, longest)
                texts.append((place, plain))
                found.append(Prompt(plain, []))
                continue
            token_ids = checked_ids(plain, self.limits.vocab_size)
            if kept is not None:
                token_ids = token_ids[-kept:] if params.truncation_side == "left" else token_ids[:kept]
            found.append(Prompt(text, token_ids))
        if texts:
            if self.tokenizer is None:
                raise RequestError("a text needs a tokenizer; this model has none, so give token ids")
            side = params.truncation_side or "right"
            encoded = self.tokenizer.encode_batch([text for _, text in texts], num_kept=kept, side=side)
            for (place, text), token_ids in zip(texts, encoded, strict=True):
                found[place] = Prompt(text, token_ids)
        pooling, streams = self._pooling(params, task), list[PoolingStream]()
        for place, (prompt, name) in enumerate(zip(found, ids, strict=True)):
            self._check_length(prompt.token_ids, _place(place, len(found)), longest)
            if len(prompt.token_ids) <= self.limits.max_model_len:
                streams.append(PoolingStream(name, prompt, wire, pooling))
                continue
            added = self._num_added(prompt, task)
            overlap = self.limits.max_model_len // OVERLAP_SHARE if task in TOKEN_TASKS else 0
            streams += self._windows(PoolingStream(name, prompt, wire, pooling), added, overlap)
        return streams

    def make_placed(
        self, texts: Sequence[str], params: PoolingParams, stride: int | None, ids: Sequence[str]
    ) -> list[PoolingStream]:
        """Make requests for logits of texts' tokens, with the tokens' places. Windows of a text that is longer than the
        model takes share `stride` tokens, at most half of a window; None: a quarter. Raises RequestError."""
        task: PoolingTask = "token_classify"
        self.check_task(task, params)
        if self.tokenizer is None:
            raise RequestError("entities have places in a text, and this model has no tokenizer")
        if params.truncate_prompt_tokens is not None:
            raise RequestError("truncate_prompt_tokens does not go with entities: long texts are computed in windows")
        overlap = self.limits.max_model_len // OVERLAP_SHARE if stride is None else stride
        most = self.limits.max_model_len // 2
        if not 0 <= overlap <= most:
            raise RequestError(f"stride must be between 0 and {most}, got {overlap}")
        wire, longest, streams = _wire_params(params), self._longest(task, None), list[PoolingStream]()
        for place, text in enumerate(texts):
            self._check_text(text, wire, _place(place, len(texts)), longest, may_cut=False)
        for place, (text, placed, name) in enumerate(zip(texts, self.tokenizer.placed_batch(texts), ids, strict=True)):
            self._check_length(placed.token_ids, _place(place, len(texts)), longest, may_cut=False)
            prompt = Prompt(text, placed.token_ids)
            whole = PoolingStream(name, prompt, wire, Pooling(task, use_activation=False))
            whole.placed = placed
            fits = len(placed.token_ids) <= self.limits.max_model_len
            streams += [whole] if fits else self._windows(whole, placed.num_added(), overlap)
        return streams

    def make_pairs(
        self, pairs: Sequence[Pair], params: PoolingParams, ids: Sequence[str], instruction: str | None = None
    ) -> list[PoolingStream]:
        """Make requests that score pairs of texts by the model's head. Raises RequestError."""
        self.check_task("score", params)
        if self.tokenizer is None:
            raise RequestError("pairs of texts need a tokenizer, and this model has none")
        wire, kept, streams = _wire_params(params), self._num_kept(params), []
        pooling = self._pooling(params, "score")
        for place, (pair, name) in enumerate(zip(pairs, ids, strict=True)):
            where = _place(place, len(pairs))
            for text in pair:
                self._check_text(text, wire, where)
            if self.limits.pooler.makes_pairs == "template":
                token_ids, own = reranker_prompt(self.tokenizer, pair, kept, instruction), pooling
            else:
                token_ids, second_at = encode_pair(self.tokenizer, pair, kept)
                own = pooling if not second_at else Pooling(pooling.task, 0, pooling.use_activation, second_at)
            self._check_length(token_ids, where)
            streams.append(PoolingStream(name, Prompt(None, token_ids), wire, own))
        return streams

    # ---- inside

    def _windows(self, whole: PoolingStream, added: tuple[int, int], overlap: int) -> list[PoolingStream]:
        """Make a stream for each window of a text that is too long for one."""
        streams = []
        for number, (prompt, part) in enumerate(windows_of(whole.prompt, added, self.limits.max_model_len, overlap)):
            own = PoolingStream(f"{whole.request_id}-w{number}", prompt, whole.params, whole.pooling)
            own.part, own.placed = part, whole.placed
            streams.append(own)
        return streams

    def _num_added(self, prompt: Prompt, task: PoolingTask) -> tuple[int, int]:
        """Numbers of special tokens at both ends of a long text; none are added to token ids. Raises RequestError for
        token ids if a task needs the rows of these tokens."""
        if prompt.text is None or self.tokenizer is None:
            if task in TOKEN_TASKS:
                raise PooledLengthError(self.limits.max_model_len, len(prompt.token_ids))
            return 0, 0
        (placed,) = self.tokenizer.placed_batch([prompt.text])
        return placed.num_added() if placed.token_ids == prompt.token_ids else (0, 0)

    def _longest(self, task: PoolingTask, kept: int | None) -> int:
        """Maximum tokens of a text, which may be computed in windows unless it is truncated to `kept` tokens."""
        usual, longer = self.limits.max_model_len, 0
        if kept is None:
            longer = {"embed": self.limits.pooler.longest_text, "token_classify": LONGEST_TEXT}.get(task, 0)
        return max(usual, longer)

    def _num_kept(self, params: PoolingParams) -> int | None:
        """Number of a prompt's tokens to keep; None means all."""
        if params.truncate_prompt_tokens == -1:
            return self.limits.max_model_len
        return params.truncate_prompt_tokens

    def _pooling(self, params: PoolingParams, task: PoolingTask) -> Pooling:
        active = params.activation
        if active is None:
            active = task not in ("embed", "token_embed") or self.limits.pooler.normalizes
        return Pooling(task, params.dimensions or 0, active)

    def _check_text(
        self, text: str, wire: SamplingParams, where: str, longest: int | None = None, *, may_cut: bool = True
    ) -> None:
        longest = longest or self.limits.max_model_len
        try:
            check_text(text, self.tokenizer, longest + 1, wire)
        except ContextLengthError as error:
            raise PooledLengthError(longest, None, where, may_cut=may_cut) from error
        except RequestError as error:
            raise RequestError(f"{where}{error}") from error

    def _check_length(
        self, token_ids: Sequence[int], where: str, longest: int | None = None, *, may_cut: bool = True
    ) -> None:
        longest = longest or self.limits.max_model_len
        if not token_ids:
            raise RequestError(f"{where}{NO_TEXT}")
        if len(token_ids) > longest:
            raise PooledLengthError(longest, len(token_ids), where, may_cut=may_cut)


def _place(place: int, count: int) -> str:
    """Prefix of an error that names the text, if there are several."""
    return f"text {place}: " if count > 1 else ""


def _wire_params(params: PoolingParams) -> SamplingParams:
    """Params for the engine's scheduler: user, deadline and priority."""
    return SamplingParams(
        max_tokens=1,
        seed=0,
        priority=params.priority,
        user=params.user,
        cache_salt=params.cache_salt,
        deadline_ms=params.deadline_ms,
        truncate_prompt_tokens=params.truncate_prompt_tokens,
    )


def similarity(first: Sequence[float], second: Sequence[float]) -> float:
    """Cosine similarity of two vectors."""
    product = sum(x * y for x, y in zip(first, second, strict=True))
    lengths = sum(x * x for x in first) * sum(y * y for y in second)
    return max(-1.0, min(1.0, float(product / lengths**0.5))) if lengths else 0.0
