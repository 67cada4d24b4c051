"""Intake: checks clients' messages and turns them into requests of the scheduler, or refuses them with the numbers."""

from collections import abc
from hashlib import blake2b
from itertools import pairwise, starmap
from typing import NamedTuple

import msgspec

from vllm_lite.engine.adapters import Adapter
from vllm_lite.engine.request import Produced, Request, stop_ids
from vllm_lite.engine.scheduling.scheduler import Scheduler
from vllm_lite.engine.sequence import Sequence
from vllm_lite.errors import ContextLengthError, PooledLengthError, RequestError
from vllm_lite.protocol.api import ForkRequest, Generate
from vllm_lite.protocol.codec import unpack_tokens
from vllm_lite.protocol.control import Ready
from vllm_lite.protocol.encoder import MAX_CONTENT_BYTES, MediaContent
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.pooling import MAX_POOLED_BYTES, TOKEN_TASKS, PoolerInfo, Pooling
from vllm_lite.protocol.spans import Media

MAX_HELD_BYTES = 16 * MAX_CONTENT_BYTES
"""Maximum bytes of media contents of all live requests together."""
MAX_PROMPT_SCORES = 1 << 21
"""Maximum logprobs of one prompt: as many as fit into one message, about 32 MiB."""


class Attached(NamedTuple):
    """An accepted Generate. `resend`: tokens that the client lacks. `done`: ends of samples of which it has all tokens.
    `replaced`: another client whose stream this one took over; `replaced_at`: output tokens of the first open sample at
    that time."""

    request: Request
    resend: list[int]
    done: list[Produced]
    replaced: bytes | None = None
    replaced_at: int = 0


class ModelFacts(NamedTuple):
    """Facts about the model: vocabulary size, EOS token ids, its pooler, and the kinds of media that it takes."""

    vocab_size: int
    eos: frozenset[int]
    pooler: PoolerInfo = PoolerInfo()
    media_kinds: frozenset[str] = frozenset()
    media_token_bytes: int = 0
    """Bytes of media content per token; 0: the model reads no contents."""
    media_bytes_vary: bool = False
    """Whether a content may have fewer bytes per token."""
    whole_media: bool = False
    """Whether each medium is computed in one step."""

    @classmethod
    def of(cls, ready: Ready) -> "ModelFacts":
        media = frozenset(ready.placeholders), ready.media_token_bytes, ready.media_bytes_vary, ready.whole_media
        return cls(ready.vocab_size, frozenset(ready.eos_token_ids), ready.pooler, *media)


class Intake:
    """Checks messages and creates requests from them. It reads time from `clock` only."""

    def __init__(self, scheduler: Scheduler, model: ModelFacts, clock: abc.Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._model = model
        self._clock = clock

    def add(self, client: bytes, message: Generate) -> Attached:
        """Accept a request, or attach `client` to a known one. Raises RequestError, which leaves all else unchanged."""
        known = self._scheduler.requests.get(message.request_id)
        if known is not None:
            _check_same(known, message)
            if _can_resend(known):
                return _attach(known, client, message)
        request = self.unstarted(client, message)
        done = _end_complete(request)
        self._scheduler.meter.now_s = self._clock()
        replaced, replaced_at = None, 0
        if known is not None:  # replaced by a request that continues after the client's tokens, from cached KV
            if known.client != client:
                replaced, replaced_at = known.client, known.open_samples()[0][1]
            goes_on = bool(request.sequences)
            self._scheduler.withdraw(known, is_replaced=goes_on)
        if request.sequences:
            self._scheduler.add(request)
        return Attached(request, [], done, replaced, replaced_at)

    def fork(self, client: bytes, message: ForkRequest) -> Request:
        """Start a request from the tokens and the KV of a live one. Raises RequestError."""
        parent = self._scheduler.requests.get(message.request_id)
        if parent is None:
            raise RequestError(f"request {message.request_id!r} is not running; only a live request can be forked")
        if message.child_id in self._scheduler.requests:
            raise RequestError(f"request id {message.child_id!r} is in use; choose another")
        if parent.pooling is not None:
            raise RequestError(f"request {message.request_id!r} is pooled and generates nothing that could be forked")
        if parent.num_samples > 1 or parent.beam or message.params.n > 1 or message.params.use_beam_search:
            raise RequestError("only a request with one sample can be forked, and into one sample at a time")
        if message.params.prompt_logprobs is not None:
            raise RequestError("a fork does not compute its prompt; it can have no prompt_logprobs")
        sequence = parent.sequences[0]
        if message.have > sequence.num_output:
            raise RequestError(f"{message.have} tokens were claimed, but only {sequence.num_output} were generated")
        tokens = sequence.tokens[: parent.num_prompt + message.have]
        prompt, output = tokens[: parent.num_prompt].tobytes(), tokens[parent.num_prompt :].tobytes()
        named = message.external_id, message.context
        generate = Generate(message.child_id, prompt, message.params, message.have, output, *named, media=parent.media)
        generate = msgspec.structs.replace(generate, contents=tuple(starmap(MediaContent, parent.contents.items())))
        child = self._make_request(client, generate, parent.num_prompt, parent.adapter)
        if child.num_tokens >= child.max_len:
            raise RequestError(f"max_tokens must be more than the {message.have} tokens the fork starts with")
        self._scheduler.meter.now_s = self._clock()
        child.logprobs = parent.logprobs[: max(0, len(parent.logprobs) - (sequence.num_output - message.have))]
        self._scheduler.fork(parent, child)
        return child

    def unstarted(self, client: bytes, message: Generate) -> Request:
        """A request of which the scheduler does not know. Raises RequestError."""
        self._check_content(message)
        return self._make_request(client, message, len(message.prompt) // 4, self._adapter_of(message))

    def _adapter_of(self, message: Generate) -> Adapter | None:
        """The adapter that the message names, or None. Raises RequestError for an unknown name."""
        if not message.adapter:
            return None
        adapter = self._scheduler.queues.adapters.get(message.adapter)
        if adapter is None:
            raise RequestError(f"there is no adapter {message.adapter!r}; load it first")
        return adapter

    def _make_request(self, client: bytes, message: Generate, num_prompt: int, adapter: Adapter | None) -> Request:
        params = message.params
        if message.pooling is None and not self._model.pooler.generates:
            raise RequestError(f"this model generates no text; it can be asked to {_listed(self._model.pooler.tasks)}")
        try:
            params.check_vocabulary(self._model.vocab_size)
        except ValueError as error:
            raise RequestError(str(error)) from error
        if params.bad_words:
            raise RequestError("bad_words must come to the engine as bad_words_token_ids")
        if params.structured_outputs is not None or params.thinking_token_budget is not None:
            raise RequestError("structured_outputs must come to the engine as a grammar, a budget as part of thinking")
        if params.extra_args is not None:
            raise RequestError("extra_args are the client's own; the engine takes none")
        params = _with_seed(message)
        message = msgspec.structs.replace(message, params=params, pooling=self._pooling(message.pooling, num_prompt))
        if params.prompt_logprobs is not None and num_prompt * (params.prompt_logprobs + 1) > MAX_PROMPT_SCORES:
            raise RequestError(
                f"prompt_logprobs of {params.prompt_logprobs} for {num_prompt} prompt tokens are more than "
                f"{MAX_PROMPT_SCORES} numbers; ask for fewer"
            )
        max_len = self._scheduler.max_len  # the limit of context and KV cache
        if params.max_tokens is not None:
            max_len = min(max_len, num_prompt + params.max_tokens)
        if message.pooling is not None:
            max_len = num_prompt + 1  # room for one token, which a pooled prompt never gets
        request = Request(message, client, max_len, stop_ids(params, self._model.eos), adapter)
        num_choices = self._model.vocab_size - len(request.stop_ids)
        if request.beam is not None and params.n > num_choices:
            raise RequestError(f"beam search over {params.n} beams, but only {num_choices} tokens can continue one")
        if params.deadline_ms is not None:
            request.deadline_s = self._clock() + params.deadline_ms / 1000
        return request

    def _pooling(self, asked: Pooling | None, num_prompt: int) -> Pooling | None:
        """Check the pooling parameters, and set whether they read all tokens of the prompt. Raises RequestError."""
        if asked is None:
            return None
        model = self._model.pooler
        if asked.task not in model.tasks:
            able = f"it can be asked to {_listed(model.tasks)}" if model.tasks else "it generates text"
            raise RequestError(f"this model cannot be asked to {asked.task}; {able}")
        if asked.dimensions > model.size:
            raise RequestError(f"dimensions must be at most the {model.size} of the model, got {asked.dimensions}")
        per_token, size = asked.task in TOKEN_TASKS, model.row_size(asked.task)
        num_bytes = 4 * num_prompt * size
        if per_token and num_bytes > MAX_POOLED_BYTES:
            raise RequestError(
                f"{size} numbers for each of {num_prompt} tokens are {num_bytes} bytes; a request gets "
                f"{MAX_POOLED_BYTES} at most"
            )
        reads_all = per_token or not model.reads_last
        return msgspec.structs.replace(asked, reads_all=reads_all)

    def _check_content(self, message: Generate) -> None:
        """Check the tokens and media of a Generate: first their numbers, before reading millions of tokens."""
        num_prompt, max_tokens = _num_tokens("prompt", message.prompt), message.params.max_tokens
        if not num_prompt:
            raise RequestError("the prompt is empty; at least one token is needed")
        if message.num_scored > num_prompt:
            raise RequestError(f"num_scored must be at most the prompt's {num_prompt} tokens, got {message.num_scored}")
        _check_samples(message)
        num_output = _num_tokens("output", message.output)
        if num_output != message.have:
            raise RequestError(f"output must hold the {message.have} tokens the client has, got {num_output}")
        if num_output and (message.params.n > 1 or message.params.use_beam_search):
            raise RequestError(
                "a request with several samples begins with its prompt, or says in `samples` what each has, and beams "
                "begin with it always; send no output with it"
            )
        if message.pooling is None:
            self._check_length(num_prompt, num_output, max_tokens)
        elif num_prompt > self._scheduler.max_len:
            longest = self._scheduler.max_len
            raise PooledLengthError(longest, num_prompt)
        elif num_output or message.params.n > 1 or message.params.use_beam_search:
            raise RequestError("a request that is pooled has one sample, without output")
        for sample in message.samples:
            self._check_length(num_prompt, _num_tokens("output of a sample", sample.output), max_tokens)
        self._check_tokens("prompt", message.prompt)
        self._check_tokens("output", message.output)
        for sample in message.samples:
            self._check_tokens(f"output of sample {sample.index}", sample.output)
        self._check_media(message.media, num_prompt)
        if message.media and self._model.media_token_bytes:
            self._check_contents(message)

    def _check_tokens(self, what: str, data: bytes) -> None:
        """Raise RequestError if `data` has a token id that is not in the vocabulary."""
        largest = max(unpack_tokens(data), default=0)
        if largest >= self._model.vocab_size:
            raise RequestError(f"token ids must be below {self._model.vocab_size}, the {what} holds {largest}")

    def _check_media(self, media: abc.Sequence[Media], num_prompt: int) -> None:
        """Raise RequestError for media that the model does not take, that overlap or are out of order."""
        end, kinds = 0, self._model.media_kinds
        for medium in media:
            if medium.kind not in kinds:
                takes = f"text and {', '.join(sorted(kinds))}" if kinds else "text only"
                raise RequestError(f"the prompt has a medium of kind {medium.kind!r}; this model takes {takes}")
            if not end <= medium.start < medium.end <= num_prompt:
                raise RequestError(
                    f"media must lie in the prompt's {num_prompt} tokens, in order and apart from each other; got one "
                    f"from {medium.start} to {medium.end} behind one that ends at {end}"
                )
            end = medium.end

    def _check_contents(self, message: Generate) -> None:
        """Raise RequestError unless each medium's content has the size that its tokens need, and there is room."""
        sizes = {each.digest: len(each.content) for each in message.contents}
        for medium in message.media:
            need, have = medium.num_tokens * self._model.media_token_bytes, sizes.get(medium.digest, 0)
            if need != have and not (self._model.media_bytes_vary and 0 < have < need):
                most = "at most " if self._model.media_bytes_vary else ""
                raise RequestError(
                    f"a medium of {medium.num_tokens} tokens needs {most}{need} bytes of content, got {have}"
                )
            if self._model.whole_media:
                self._check_whole(medium)
        total = sum(sizes.values())
        if total > MAX_CONTENT_BYTES:
            raise RequestError(f"the media of a prompt have {total} bytes; at most {MAX_CONTENT_BYTES} are taken")
        held = sum(len(each) for request in self._scheduler.requests.values() for each in request.contents.values())
        if held + total > MAX_HELD_BYTES:
            raise RequestError(f"live requests hold {held} bytes of media, at most {MAX_HELD_BYTES}; send it later")

    def _check_whole(self, medium: Media) -> None:
        """Raise RequestError for a medium that does not fit into a step beside one token of each other sequence."""
        options = self._scheduler.options
        budget, others = options.max_num_batched_tokens, options.max_num_seqs - 1
        if medium.num_tokens + others > budget:
            raise RequestError(
                f"an {medium.kind} of {medium.num_tokens} tokens is computed in one step, which has {budget} tokens, "
                f"of which up to {others} are for other sequences; --max-num-batched-tokens must be at least "
                f"{medium.num_tokens + others} for it"
            )

    def _check_length(self, num_prompt: int, num_output: int, max_tokens: int | None) -> None:
        longest = self._scheduler.max_len
        if num_prompt >= longest:
            raise ContextLengthError(longest, num_prompt, max_tokens)
        if num_prompt + num_output > longest:
            raise RequestError(
                f"the prompt's {num_prompt} tokens and the {num_output} of output that came with it are more than "
                f"the {longest} that fit"
            )


def _check_same(known: Request, message: Generate) -> None:
    """Raise RequestError unless `message` is the live request `known`, sent again."""
    if known.sequences[0].tokens[: known.num_prompt].tobytes() != message.prompt:
        raise RequestError(f"request id {message.request_id!r} is in use for another prompt; choose another id")
    if known.media != message.media:
        raise RequestError(f"request id {message.request_id!r} is in use for other media; choose another id")
    asked = message.pooling and msgspec.structs.replace(message.pooling, reads_all=True)
    if asked != (known.pooling and msgspec.structs.replace(known.pooling, reads_all=True)):
        raise RequestError(f"request id {message.request_id!r} is in use to pool otherwise; choose another id")
    other = _difference(known.params, _with_seed(message))
    if message.adapter != ("" if known.adapter is None else known.adapter.name):
        other = "adapter"
    if other is not None:
        raise RequestError(
            f"request id {message.request_id!r} is in use with another {other}; send the same parameters to attach "
            "to it, or choose another id"
        )


def _can_resend(request: Request) -> bool:
    """Whether tokens are all that a client of `request` can lack, since logprobs are not kept."""
    params = request.params
    is_single = request.num_samples == 1 and request.beam is None
    return is_single and params.logprobs is None and params.prompt_logprobs is None


def _attach(request: Request, client: bytes, message: Generate) -> Attached:
    """Continue the stream of a live request to `client`, from the first token that the client lacks."""
    sequence: Sequence = request.sequences[0]
    if message.have > sequence.num_output:
        raise RequestError(f"{message.have} tokens were claimed, but only {sequence.num_output} were generated")
    replaced = None if request.client == client else request.client
    request.client = client
    resend = sequence.tokens[request.num_prompt + message.have :].tolist()
    return Attached(request, resend, [], replaced, sequence.num_output)


def _end_complete(request: Request) -> list[Produced]:
    """Remove the samples of a new request that are complete already, and return their ends, which the client lacks."""
    done = []
    for sequence in list(request.sequences):
        reason = sequence.finish_reason(sequence.tokens[-1]) if sequence.num_output else None
        if reason is not None:
            request.sequences.remove(sequence)
            done.append(Produced(request, sequence.index, sequence.num_output, [], reason=reason))
    return done


def _check_samples(message: Generate) -> None:
    """Raise RequestError if the request of a Generate cannot have its samples."""
    if not message.samples:
        return
    params, indices = message.params, [sample.index for sample in message.samples]
    if params.n == 1 or params.use_beam_search:
        raise RequestError("samples are for a request that has several and is not a beam search; send have and output")
    if message.have or message.output:
        raise RequestError("have and output must be empty if `samples` has the tokens of each sample")
    if indices[-1] >= params.n or any(first >= then for first, then in pairwise(indices)):
        raise RequestError(f"the samples must be in the order of their indices, each below n={params.n}; got {indices}")


def _with_seed(message: Generate) -> SamplingParams:
    """The message's parameters with a seed: the client's, or one that depends on nothing but the request id."""
    if message.params.seed is not None:
        return message.params
    seed = int.from_bytes(blake2b(message.request_id.encode(), digest_size=8).digest(), "little")
    return msgspec.structs.replace(message.params, seed=seed)


def _difference(known: SamplingParams, asked: SamplingParams) -> str | None:
    """The first parameter that differs, with its values if they are numbers: others may be long, or secret."""
    asked = msgspec.structs.replace(asked, deadline_ms=known.deadline_ms)  # a client sends what is left of it
    if known == asked:
        return None
    for name in known.__struct_fields__:
        values = getattr(known, name), getattr(asked, name)
        if values[0] != values[1]:
            are_numbers = all(value is None or isinstance(value, int | float) for value in values)
            return f"{name} ({values[0]}, not {values[1]})" if are_numbers else name
    return None


def _listed(tasks: abc.Sequence[str]) -> str:
    """Join task names: "embed or classify"."""
    return " or ".join(tasks)


def _num_tokens(what: str, data: bytes) -> int:
    """Number of token ids in `data`. Raises RequestError unless its length is a multiple of 4."""
    if len(data) % 4:
        raise RequestError(f"{what} must be u32 token ids, got {len(data)} bytes, which is not a multiple of 4")
    return len(data) // 4
