"""Vectors and scores: prompts in, one message to the engine and one back for each of them. No torch.

PoolingFactory checks and tokenizes what a user gives; a PoolingStream is one request, which LLM, AsyncClient and the
server follow as they follow those that generate.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_lite.client.outputs import RequestMetrics
from vllm_lite.client.prompt import Prompt, PromptLike, check_text, checked_ids, unwrap
from vllm_lite.client.text.pairs import Pair, encode_pair, reranker_prompt
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.errors import ContextLengthError, PooledLengthError, RequestError, VllmLiteError
from vllm_lite.protocol.api import Finished, Generate, Welcome
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.pooling import Pooling, PoolingParams, PoolingTask

if TYPE_CHECKING:  # both import the events of streams
    from vllm_lite.client.engines.any_session import AnySession
    from vllm_lite.client.streams.stream import Event

Check = Callable[[], None]
NO_TEXT = "the text is empty; it needs at least one token"


@dataclass(slots=True)
class PoolingOutput:
    """The numbers of one request: a vector, a number for each label, or a list of a vector for each token."""

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
    """The result of one request. `outputs` is of the kind that the call asks for."""

    request_id: str
    outputs: Any
    prompt_token_ids: list[int]
    prompt: str | None = None
    num_cached_tokens: int = 0
    finished: bool = True


class PoolingStream:
    """One request from its message to its end. Events after the end are ignored."""

    num_tokens = 0
    """It generates none."""
    ends_at_once = True

    def __init__(self, request_id: str, prompt: Prompt, params: SamplingParams, pooling: Pooling) -> None:
        """Made by PoolingFactory."""
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.pooling = pooling
        self.adapter = ""
        """The name of the adapter that computes it."""
        self.samples = (None,)
        self.finished = False
        self.error: VllmLiteError | None = None
        self.metrics = RequestMetrics(0.0)
        self.num_cached_tokens = 0
        self.data = b""
        """Float32 numbers, once it has finished without an error."""

    def message(self) -> Generate:
        """Make the message that starts this request in an engine."""
        prompt = pack_tokens(self.prompt.token_ids)
        return Generate(self.request_id, prompt, self.params, pooling=self.pooling, adapter=self.adapter)

    def own_message(self) -> None:
        """It is no fork."""

    def starts_again(self, event: "Event", is_live: Callable[[str], bool]) -> bool:
        """It is no fork."""
        del event, is_live
        return False

    def apply(self, event: "Event") -> None:
        """Take the next event."""
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
        """Drop in the session what has ended here."""
        if self.finished:
            session.drop(self.request_id, stopped=self.error is None)

    def numbers(self) -> list[float]:
        """All numbers, one after the other."""
        return array("f", self.data).tolist()

    def rows(self) -> Iterator[list[float]]:
        """The vector of one token after the other."""
        numbers = array("f", self.data)
        size = len(numbers) // len(self.prompt.token_ids)
        return (numbers[start : start + size].tolist() for start in range(0, len(numbers), size))

    def output(self) -> PoolingRequestOutput:
        """The result, in the form that the task has."""
        task = self.pooling.task
        outputs: Any
        if task == "token_embed":
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


class PoolingFactory:
    """Makes streams for one engine. Without a tokenizer prompts are token ids."""

    def __init__(self, limits: Welcome, tokenizer: Tokenizer | None) -> None:
        self.limits = limits
        self.tokenizer = tokenizer

    @property
    def tasks(self) -> tuple[PoolingTask, ...]:
        """Tasks that the model can do."""
        return self.limits.pooler.tasks

    @property
    def first_task(self) -> PoolingTask:
        """The task of requests that name none."""
        return self.tasks[0] if self.tasks else "embed"

    def check_task(self, task: PoolingTask, params: PoolingParams) -> None:
        """Raises RequestError if the model, or what is asked of it, does not go with the task."""
        pooler = self.limits.pooler
        if task not in pooler.tasks:
            if not pooler.tasks:
                able = "it generates text; start it with --convert embed for vectors"
            else:
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
        """Check and tokenize prompts, the texts among them together. Raises RequestError."""
        self.check_task(task, params)
        wire, kept = _wire_params(params), self._num_kept(params)
        found: list[Prompt] = []
        texts: list[tuple[int, str]] = []
        for place, given in enumerate(prompts):
            plain, text = unwrap(given)
            if isinstance(plain, str):
                with_place = _place(place, len(prompts))
                self._check_text(plain, wire, with_place)
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
        pooling = self._pooling(params, task)
        for place, prompt in enumerate(found):
            self._check_length(prompt.token_ids, _place(place, len(found)))
        return [PoolingStream(name, prompt, wire, pooling) for name, prompt in zip(ids, found, strict=True)]

    def make_pairs(
        self, pairs: Sequence[Pair], params: PoolingParams, ids: Sequence[str], instruction: str | None = None
    ) -> list[PoolingStream]:
        """Requests that score pairs of texts by the model's head. Raises RequestError."""
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

    def _check_text(self, text: str, wire: SamplingParams, where: str) -> None:
        try:
            check_text(text, self.tokenizer, self.limits.max_model_len + 1, wire)
        except ContextLengthError as error:
            raise PooledLengthError(self.limits.max_model_len, None, where) from error
        except RequestError as error:
            raise RequestError(f"{where}{error}") from error

    def _check_length(self, token_ids: Sequence[int], where: str) -> None:
        longest = self.limits.max_model_len
        if not token_ids:
            raise RequestError(f"{where}{NO_TEXT}")
        if len(token_ids) > longest:
            raise PooledLengthError(longest, len(token_ids), where)


def _place(place: int, count: int) -> str:
    """Prefix of an error that names the text it is about, if there are several."""
    return f"text {place}: " if count > 1 else ""


def _wire_params(params: PoolingParams) -> SamplingParams:
    """Who asks, until when, and how urgent it is."""
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
    """The cosine of the angle between two vectors."""
    product = sum(x * y for x, y in zip(first, second, strict=True))
    lengths = sum(x * x for x in first) * sum(y * y for y in second)
    return max(-1.0, min(1.0, float(product / lengths**0.5))) if lengths else 0.0
