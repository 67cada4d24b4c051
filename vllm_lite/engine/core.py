"""EngineCore: one step is schedule, execute, update. Features hang off these three calls; none is inlined into them."""

import time
from collections import abc
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from vllm_lite import __version__
from vllm_lite.config import ResolvedConfig
from vllm_lite.engine import policy
from vllm_lite.engine.blocks.groups import make_groups
from vllm_lite.engine.blocks.host_tier import HostTier
from vllm_lite.engine.blocks.manager import KVCacheManager
from vllm_lite.engine.blocks.pool import BlockPool
from vllm_lite.engine.blocks.prefix_hash import PrefixHasher
from vllm_lite.engine.in_flight import MessageLength
from vllm_lite.engine.observe.describe import describe
from vllm_lite.engine.observe.recorder import make_recorder
from vllm_lite.engine.observe.residency import Residency
from vllm_lite.engine.queues import Options
from vllm_lite.engine.rates import PrefillRate, Rates
from vllm_lite.engine.request import Produced, Request, stop_ids
from vllm_lite.engine.scheduler import Scheduler
from vllm_lite.engine.sequence import Sequence
from vllm_lite.errors import ContextLengthError, RequestError
from vllm_lite.executor.base import Executor
from vllm_lite.protocol.api import Descriptions, ForkRequest, Generate, PrefixCacheReset, Stats
from vllm_lite.protocol.codec import unpack_tokens
from vllm_lite.protocol.control import Ready
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.step import ModelOutput
from vllm_lite.runtime import log
from vllm_lite.trace.records import Header

MAX_PROMPT_SCORES = 1 << 21
"""Most logprobs of one prompt: as many as fit into one message, about 32 MiB."""

logger = log.get(__name__)


class Attached(NamedTuple):
    """An accepted Generate. `resend` are the tokens the client lacks; `done` is set if nothing is left to generate;
    `replaced` is the client whose stream this one took over."""

    request: Request
    resend: list[int]
    done: Produced | None
    replaced: bytes | None = None


class Sizes(NamedTuple):
    """How many blocks each pool holds, and how fast blocks move between the pools."""

    num_blocks: int
    num_host_blocks: int = 0
    swap_blocks_per_s: float = 0.0


class Lives(NamedTuple):
    """Which workers and which engine these are: `generation` counts the worker groups of the engine, `life` the engines
    that were started in place of each other, and `launch` is the same for all of these."""

    generation: int = 1
    life: int = 1
    launch: str = ""


class EngineCore:
    """Drives the scheduler, its block manager and the executor, without sockets. It reads time from `clock` only."""

    def __init__(
        self,
        config: ResolvedConfig,
        ready: Ready,
        executor: Executor,
        sizes: Sizes,
        lives: Lives,
        clock: abc.Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = executor
        self._vocab_size = ready.vocab_size
        self._eos = frozenset(ready.eos_token_ids)
        self._clock = clock
        self._message_length = MessageLength()
        self._prefill_rate = PrefillRate()
        # What a drafting sequence computes next depends on its last step, so a second one would be half empty.
        self.max_in_flight = 2 if config.async_scheduling and config.speculative_config is None else 1
        header = _header(config, ready, sizes, lives, clock())
        self.scheduler = make_scheduler(header, PrefixHasher(config.block_size, config.prefix_hash_seed))
        self.scheduler.on_policy_fault = lambda what: logger.error(
            "scheduling policy %r failed, from here on it is first come, first served: %s", header.policy, what
        )
        self.kv = self.scheduler.kv
        self.meter = self.scheduler.meter
        self.recorder = make_recorder(config.record, header, self.scheduler)
        if config.kv_cache_metrics:
            one_in = round(1 / config.kv_cache_metrics_sample)
            self.meter.counters.blocks = Residency(self.kv.pool, clock, one_in).histograms
        self.max_model_len = self.scheduler.max_len
        self.in_flight = self.scheduler.in_flight

    # ---- requests

    def add(self, client: bytes, message: Generate) -> Attached:
        """Accept a request, or attach `client` to a known one. Raises RequestError; nothing else is disturbed."""
        known = self.scheduler.requests.get(message.request_id)
        if known is not None:
            return self._attach(known, client, message)
        num_prompt, num_output = _num_tokens("prompt", message.prompt), _num_tokens("output", message.output)
        if not num_prompt:
            raise RequestError("the prompt is empty; at least one token is needed")
        if num_output != message.have:
            raise RequestError(f"output must hold the {message.have} tokens the client has, got {num_output}")
        if num_output and (message.params.n > 1 or message.params.use_beam_search):
            raise RequestError("a request with several samples starts from its prompt; send no output with it")
        # Before anything reads millions of tokens.
        self._check_length(num_prompt, num_output, message.params.max_tokens)
        self._check_tokens("prompt", message.prompt)
        output = self._check_tokens("output", message.output)
        request = self._make_request(client, message, num_prompt)
        reason = request.sequences[0].finish_reason(output[-1]) if output else None
        if reason is not None:  # the client lacks nothing but the end
            return Attached(request, [], Produced(request, 0, len(output), [], reason=reason))
        self.meter.now_s = self._clock()
        self.scheduler.add(request)
        self.recorder.arrived(request, self._clock())
        return Attached(request, [], None)

    def fork(self, client: bytes, message: ForkRequest) -> Request:
        """Start a request from the tokens and the KV of a live one. Raises RequestError."""
        parent = self.scheduler.requests.get(message.request_id)
        if parent is None:
            raise RequestError(f"request {message.request_id!r} is not running; only a live request can be forked")
        if message.child_id in self.scheduler.requests:
            raise RequestError(f"request id {message.child_id!r} is in use; choose another")
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
        generate = Generate(message.child_id, prompt, message.params, message.have, output, *named)
        child = self._make_request(client, generate, parent.num_prompt)
        if child.num_tokens >= child.max_len:
            raise RequestError(f"max_tokens must be more than the {message.have} tokens the fork starts with")
        self.meter.now_s = self._clock()
        child.logprobs = parent.logprobs[: max(0, len(parent.logprobs) - (sequence.num_output - message.have))]
        self.scheduler.branching.fork_request(parent, child)
        self.recorder.forked(parent, child, self._clock())
        return child

    def abort(
        self, request_id: str, samples: abc.Sequence[int] = (), *, stopped: bool = False
    ) -> list[tuple[int, int]]:
        """End a request, or those of its `samples`. `stopped`: its client has all it wanted.

        Returns (sample, number of its output tokens) of all that have ended by this.
        """
        request = self.scheduler.requests.get(request_id)
        if request is None:
            return []
        self.meter.now_s = now_s = self._clock()
        ended = self.scheduler.branching.end_samples(request, samples, "stop" if stopped else "abort")
        if ended:
            self.recorder.aborted(request, samples and [sample for sample, _ in ended], now_s)
        return ended

    def describe(
        self, request_ids: abc.Sequence[str] = (), external_id: str = "", *, with_content: bool = False
    ) -> Descriptions:
        requests, external = self.scheduler.requests, self.scheduler.queues.external
        known = [requests[request_id] for request_id in request_ids if request_id in requests]
        asked = dict.fromkeys(known + external.live(external_id))
        states = describe(self.scheduler, asked, self._clock(), with_content=with_content)
        return Descriptions(states, external.ended(external_id))

    def reset_prefix_cache(self) -> PrefixCacheReset:
        done = self.scheduler.reset_prefix_cache()
        self.recorder.cache_reset(self._clock())
        return done

    def _make_request(self, client: bytes, message: Generate, num_prompt: int) -> Request:
        params = message.params
        try:
            params.check_vocabulary(self._vocab_size)
        except ValueError as error:
            raise RequestError(str(error)) from error
        if params.bad_words:
            raise RequestError("bad_words must come to the engine as bad_words_token_ids")
        if params.extra_args is not None:
            raise RequestError("extra_args are the client's own; the engine takes none")
        params = _with_seed(message)
        message = msgspec.structs.replace(message, params=params)
        if params.prompt_logprobs is not None and num_prompt * (params.prompt_logprobs + 1) > MAX_PROMPT_SCORES:
            raise RequestError(
                f"prompt_logprobs of {params.prompt_logprobs} for {num_prompt} prompt tokens are more than "
                f"{MAX_PROMPT_SCORES} numbers; ask for fewer"
            )
        max_len = self.max_model_len  # context and KV cache hold no more, whatever `max_tokens` says
        if params.max_tokens is not None:
            max_len = min(max_len, num_prompt + params.max_tokens)
        request = Request(message, client, max_len, stop_ids(params, self._eos))
        num_choices = self._vocab_size - len(request.stop_ids)
        if request.beam is not None and params.n > num_choices:
            raise RequestError(f"beam search over {params.n} beams, but only {num_choices} tokens go on")
        if params.deadline_ms is not None:
            request.deadline_s = self._clock() + params.deadline_ms / 1000
        return request

    def _attach(self, request: Request, client: bytes, message: Generate) -> Attached:
        sequence: Sequence = request.sequences[0]
        if sequence.tokens[: request.num_prompt].tobytes() != message.prompt:
            raise RequestError(f"request id {message.request_id!r} is in use for another prompt; choose another id")
        other = _difference(request.params, _with_seed(message))
        if other is not None:
            raise RequestError(
                f"request id {message.request_id!r} is in use with another {other}; send the same parameters to attach "
                "to it, or choose another id"
            )
        if request.num_samples > 1 or request.beam or request.params.prompt_logprobs is not None:
            raise RequestError(
                f"request {message.request_id!r} has several samples or prompt_logprobs and cannot be attached to again"
            )
        if message.have > sequence.num_output:
            raise RequestError(f"{message.have} tokens were claimed, but only {sequence.num_output} were generated")
        replaced = None if request.client == client else request.client
        request.client = client
        resend = sequence.tokens[request.num_prompt + message.have :].tolist()
        return Attached(request, resend, None, replaced)

    def _check_tokens(self, what: str, data: bytes) -> list[int]:
        """Unpack the token ids of `data`. Raises RequestError for one that is not in the vocabulary."""
        tokens = unpack_tokens(data)
        if tokens and max(tokens) >= self._vocab_size:
            raise RequestError(f"token ids must be below {self._vocab_size}, the {what} holds {max(tokens)}")
        return tokens

    def _check_length(self, num_prompt: int, num_output: int, max_tokens: int | None) -> None:
        longest = self.max_model_len
        if num_prompt >= longest:
            raise ContextLengthError(longest, num_prompt, max_tokens)
        if num_prompt + num_output > longest:
            raise RequestError(
                f"the prompt's {num_prompt} tokens and the {num_output} of output that came with it are more than "
                f"the {longest} that fit"
            )

    # ---- the step

    def expire(self) -> list[Produced]:
        """End the requests whose deadline has passed."""
        now_s = self.meter.now_s = self._clock()
        ended = self.scheduler.expire(now_s)
        self.recorder.expired(ended, now_s)
        return ended

    def begin(self) -> bool:
        """Schedule a step for the workers, if there is anything to compute and not too much in flight.

        Call it until it returns False: only then have all steps been sent.
        """
        now_s = self._clock()
        step = None
        if not self.scheduler.has_workers:
            return False
        if self._may_begin():
            if self.scheduler.requests:
                step = self.recorder.schedule(now_s)
            else:
                self.meter.rest(now_s)
        ends_message = True
        if step is not None:
            self.meter.scheduled(self.scheduler.num_scheduled_tokens)
            ends_message = (
                not self.in_flight.newest.only_decodes or self.in_flight.num_unsent >= self._message_length.steps
            )
        if self.in_flight.num_unsent and ends_message:
            self._executor.submit(*self.in_flight.send(now_s))
        return step is not None

    def _may_begin(self) -> bool:
        """Whether the message being made may get another step, or a new one may be begun: workers compute one message
        while the next one is made."""
        return (
            self.in_flight.num_unsent > 0
            or len(self.in_flight) <= (self.max_in_flight - 1) * self._message_length.steps
        )

    def finish(self, output: ModelOutput) -> list[Produced]:
        """Apply the result of the oldest step in flight."""
        now_s = self.meter.now_s = self._clock()
        step = self.in_flight.oldest
        if step.ends_message and self._prefill_rate.measure(step.message, now_s):
            rates = self.scheduler.rates._replace(prefill_tokens_per_s=self._prefill_rate.tokens_per_s)
            self.scheduler.rates = rates
            self.recorder.measured(rates)
        if self.max_in_flight > 1:
            self._message_length.ended(now_s, steady=step.only_decodes and len(self.in_flight) > 1)
        return self.recorder.update(output, now_s)

    def lose_workers(self, cause: str) -> list[Produced]:
        """The workers have died of `cause`. Every unfinished request keeps its tokens and waits for resume(); until
        then begin() does nothing, and all else works as ever. Returns the requests that end by it."""
        now_s = self.meter.now_s = self._clock()
        self._message_length = MessageLength()
        return self.recorder.lose_workers(cause, now_s)

    def resume(self, executor: Executor, generation: int, swap_blocks_per_s: float) -> None:
        """Go on with the workers behind `executor`, which have pools of the same sizes, as a later `generation`."""
        self._executor = executor
        self.recorder.resume(generation, swap_blocks_per_s, self._clock())

    def close(self) -> None:
        """End the trace, if there is one."""
        self.recorder.close()

    def stats(self) -> Stats:
        """The engine's counters, with its gauges as they are now."""
        counters = self.meter.stats(self._clock())
        counters.num_running, counters.num_waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        return counters


def make_scheduler(header: Header, hasher: PrefixHasher) -> Scheduler:
    """The scheduler that a trace's header describes, with its policy, block manager and pools; a replay makes it anew.

    Raises ConfigError if the policy cannot be loaded.
    """
    num_host_blocks, caching = header.num_host_blocks, header.caching
    host = HostTier(num_host_blocks, header.num_blocks, caching) if num_host_blocks else None
    kv = KVCacheManager(
        BlockPool(header.num_blocks, caching),
        make_groups(header.windows, header.block_size),
        hasher,
        host=host,
        watermark=header.watermark,
        max_swap_blocks_per_step=header.max_swap_blocks_per_step,
    )
    scheduler = Scheduler(kv, Options(**header.options), policy.load(header.policy))
    scheduler.rates = Rates(0.0, header.swap_blocks_per_s)
    return scheduler


def _header(config: ResolvedConfig, ready: Ready, sizes: Sizes, lives: Lives, now_s: float) -> Header:
    """Describe this core, for its scheduler and for the trace."""
    options = Options(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=ready.max_model_len,
        chunked_prefill=config.enable_chunked_prefill,
        preemption=config.preemption_mode,
        num_drafts=config.speculative_config.num_speculative_tokens if config.speculative_config else 0,
        generation=lives.generation,
    )
    return Header(
        engine_version=__version__,
        clock_s=now_s,
        wall_s=time.time(),
        options=options._asdict(),
        policy=config.scheduling_policy,
        num_blocks=sizes.num_blocks,
        num_host_blocks=sizes.num_host_blocks,
        block_size=config.block_size,
        caching=config.enable_prefix_caching,
        windows=tuple(group.window for group in ready.groups),
        watermark=config.kv_watermark,
        max_swap_blocks_per_step=config.max_swap_blocks_per_step,
        swap_blocks_per_s=sizes.swap_blocks_per_s,
        tensor_parallel_size=config.tensor_parallel_size,
        launch=lives.launch,
        life=lives.life,
    )


def _with_seed(message: Generate) -> SamplingParams:
    """The parameters with a seed. If the client draws none, it still gets the same tokens for the same request id."""
    if message.params.seed is not None:
        return message.params
    seed = int.from_bytes(blake2b(message.request_id.encode(), digest_size=8).digest(), "little")
    return msgspec.structs.replace(message.params, seed=seed)


def _difference(known: SamplingParams, asked: SamplingParams) -> str | None:
    """Name the first parameter that is not the same. Only numbers are shown: other values may be long, or a secret."""
    if known == asked:
        return None
    for name in known.__struct_fields__:
        values = getattr(known, name), getattr(asked, name)
        if values[0] != values[1]:
            are_numbers = all(value is None or isinstance(value, int | float) for value in values)
            return f"{name} ({values[0]}, not {values[1]})" if are_numbers else name
    return None


def _num_tokens(what: str, data: bytes) -> int:
    """How many token ids `data` holds. Raises RequestError if that is no whole number."""
    if len(data) % 4:
        raise RequestError(f"{what} must be u32 token ids, got {len(data)} bytes, which is not a multiple of 4")
    return len(data) // 4
