"""EngineCore: one step is schedule, execute, update. Features hang off these three calls; none is inlined into them."""

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from vllm_lite import __version__
from vllm_lite.config import ResolvedConfig
from vllm_lite.engine import branching
from vllm_lite.engine.assembly import assemble
from vllm_lite.engine.blocks.prefix_hash import PrefixHasher
from vllm_lite.engine.cache_reset import reset_cache
from vllm_lite.engine.observe.describe import describe
from vllm_lite.engine.observe.recorder import Recorder
from vllm_lite.engine.pace import Pace
from vllm_lite.engine.plan import Options, Produced
from vllm_lite.engine.prefill_rate import PrefillRate
from vllm_lite.engine.request import Request
from vllm_lite.engine.sequence import Sequence
from vllm_lite.engine.stop import check_stop, stop_ids
from vllm_lite.errors import ContextLengthError, RequestError
from vllm_lite.executor.base import Executor
from vllm_lite.protocol.api import Descriptions, ForkRequest, Generate, PrefixCacheReset, Stats
from vllm_lite.protocol.codec import unpack_tokens
from vllm_lite.protocol.control import Ready
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.step import ModelOutput, SchedulerOutput
from vllm_lite.runtime import log
from vllm_lite.trace.records import Header

MAX_PROMPT_SCORES = 1 << 21
"""Logprobs of one prompt, so that a message holds them: about 32 MiB."""

logger = log.get(__name__)


class Attached(NamedTuple):
    """An accepted Generate. `resend` are the tokens the client lacks; `done` is set if nothing is left to generate;
    `replaced` is the client whose stream this one took over."""

    request: Request
    resend: list[int]
    done: Produced | None
    replaced: bytes | None = None


class Sizes(NamedTuple):
    """What the pools hold, in blocks, and how fast blocks move between them."""

    num_blocks: int
    num_host_blocks: int = 0
    swap_blocks_per_s: float = 0.0


class EngineCore:
    """The scheduler, its block manager and the executor, without sockets. Reads time from `clock` only."""

    def __init__(
        self,
        config: ResolvedConfig,
        ready: Ready,
        executor: Executor,
        sizes: Sizes,
        epoch: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = executor
        self._vocab_size = ready.vocab_size
        self._eos = frozenset(ready.eos_token_ids)
        self._clock = clock
        self._only_decodes: deque[bool] = deque()
        """Of each step under way."""
        self._unsent: list[SchedulerOutput] = []
        self._pace = Pace()
        self._prefill_rate = PrefillRate()
        # What a drafting sequence computes next depends on its last step, so a second one would be half empty.
        self.max_in_flight = 2 if config.async_scheduling and config.speculative_config is None else 1
        header = _header(config, ready, sizes, _options(config, ready, epoch), clock())
        self.scheduler = assemble(header, PrefixHasher(config.block_size, config.prefix_hash_seed))
        self.scheduler.on_policy_fault = lambda what: logger.error(
            "scheduling policy %r failed, from here on it is first come, first served: %s", header.policy, what
        )
        self.kv = self.scheduler.kv
        self.meter = self.scheduler.meter
        self.recorder = Recorder(config.record, header, self.scheduler) if config.record else None
        self.max_model_len = self.scheduler.max_len
        self.num_in_flight = 0

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
        self._check_length(
            num_prompt, num_output, message.params.max_tokens
        )  # before anything reads millions of tokens
        self._check_tokens("prompt", message.prompt)
        output = self._check_tokens("output", message.output)
        request = self._make_request(client, message, num_prompt)
        reason = check_stop(request.sequences[0], output[-1]) if output else None
        if reason is not None:  # the client lacks nothing but the end
            return Attached(request, [], Produced(request, 0, len(output), [], reason=reason))
        self.meter.now_s = self._clock()
        self.scheduler.add(request)
        if self.recorder is not None:
            self.recorder.arrived(request, self._clock())
        return Attached(request, [], None)

    def fork(self, client: bytes, message: ForkRequest) -> Request:
        """Start a request from what a live one has. Raises RequestError."""
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
        prompt, output = (
            tokens[: parent.num_prompt].tobytes(),
            tokens[parent.num_prompt :].tobytes(),
        )
        generate = Generate(message.child_id, prompt, message.params, message.have, output)
        child = self._make_request(client, generate, parent.num_prompt)
        if child.num_tokens >= child.max_len:
            raise RequestError(f"max_tokens must be more than the {message.have} tokens the fork starts with")
        self.meter.now_s = self._clock()
        branching.fork_request(self.scheduler, parent, child)
        if self.recorder is not None:
            self.recorder.forked(parent, child, self._clock())
        return child

    def abort(self, request_id: str, samples: Seq[int] = (), *, stopped: bool = False) -> list[tuple[int, int]]:
        """End a request, or those of its `samples`. `stopped`: its client has all it wanted.

        Returns (sample, number of its output tokens) of all that have ended by this.
        """
        request = self.scheduler.requests.get(request_id)
        if request is None:
            return []
        self.meter.now_s = now_s = self._clock()
        ended = branching.end_samples(self.scheduler, request, samples, "stop" if stopped else "abort")
        if ended and self.recorder is not None:
            self.recorder.aborted(request, samples and [sample for sample, _ in ended], now_s)
        return ended

    def describe(self, request_ids: tuple[str, ...]) -> Descriptions:
        return describe(self.scheduler, request_ids, self._clock())

    def reset_prefix_cache(self) -> PrefixCacheReset:
        done = reset_cache(self.scheduler)
        if self.recorder is not None:
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
        request = Request(
            message,
            client,
            self._max_len(num_prompt, params),
            stop_ids(params, self._eos),
        )
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
        """The token ids of `data`."""
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

    def _max_len(self, num_prompt: int, params: SamplingParams) -> int:
        """Where the sequence ends at the latest: context and KV cache hold no more, whatever `max_tokens` says."""
        longest = self.max_model_len
        return longest if params.max_tokens is None else min(longest, num_prompt + params.max_tokens)

    # ---- the step

    def expire(self) -> list[Produced]:
        """End what has passed its deadline."""
        now_s = self.meter.now_s = self._clock()
        ended = self.scheduler.expire(now_s)
        if ended and self.recorder is not None:
            self.recorder.expired(ended, now_s)
        return ended

    def begin(self) -> bool:
        """Schedule a step for the workers, if there is anything to compute and not too much under way. Call it until
        it says no: only then have all steps been sent."""
        now_s = self._clock()
        plan = self._schedule(now_s) if self._may_begin() else None
        only_decodes = True
        if plan is not None:
            num_tokens = self.scheduler.num_scheduled_tokens
            self.meter.step_tokens.observe(num_tokens)
            only_decodes = num_tokens <= len(self.scheduler.running)
            self._unsent.append(plan)
            self.num_in_flight += 1
            self._only_decodes.append(only_decodes)
            self._prefill_rate.scheduled(plan, num_tokens, only_decodes=only_decodes)
        if self._unsent and (plan is None or not only_decodes or len(self._unsent) >= self._pace.steps):
            unsent, self._unsent = self._unsent, []
            self._executor.submit(*unsent)
            self._prefill_rate.sent(now_s)
        return plan is not None

    def _may_begin(self) -> bool:
        """Whether a message of steps is to be continued, or begun: it is computed while the one behind it is made."""
        return bool(self._unsent) or self.num_in_flight <= (self.max_in_flight - 1) * self._pace.steps

    def _schedule(self, now_s: float) -> SchedulerOutput | None:
        if not self.scheduler.has_requests():
            self.meter.rest(now_s)
            return None
        return self.scheduler.schedule(now_s) if self.recorder is None else self.recorder.schedule(now_s)

    def finish(self, output: ModelOutput) -> list[Produced]:
        """Apply the result of the oldest step in flight."""
        self.num_in_flight -= 1
        now_s = self.meter.now_s = self._clock()
        only_decodes = self._only_decodes.popleft()
        if self._prefill_rate.ended(now_s):
            self._learn(self._prefill_rate.tokens_per_s)
        if self.max_in_flight > 1:
            self._pace.ended(now_s, steady=only_decodes and self.num_in_flight > 0)
        if self.recorder is not None:
            return self.recorder.update(output, now_s)
        return self.scheduler.update(output)

    def _learn(self, prefill_tokens_per_s: float) -> None:
        """Let the scheduler choose by a new rate; a trace must know of it."""
        self.scheduler.rates = self.scheduler.rates._replace(prefill_tokens_per_s=prefill_tokens_per_s)
        if self.recorder is not None:
            self.recorder.measured(self.scheduler.rates)

    def close(self) -> None:
        """End the trace, if there is one."""
        if self.recorder is not None:
            self.recorder.close()

    def stats(self, malformed_messages: int = 0) -> Stats:
        """All that is counted, and of the sockets what only their owner knows."""
        scheduler, pool, counters, blocks, meter = (
            self.scheduler,
            self.kv.pool,
            self.scheduler.counters,
            self.kv.stats,
            self.meter,
        )
        host = self.kv.host.pool if self.kv.host is not None else None
        return Stats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_blocks=pool.num_usable,
            num_used_blocks=pool.num_used,
            num_cached_blocks=pool.num_cached,
            peak_used_blocks=pool.peak_used,
            steps=counters.steps,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            generated_tokens=counters.generated_tokens,
            preemptions=counters.preemptions,
            swaps=counters.swaps,
            num_host_blocks=host.num_usable if host else 0,
            num_used_host_blocks=host.num_used if host else 0,
            demoted_blocks=blocks.demoted,
            promoted_blocks=blocks.promoted,
            copied_blocks=blocks.copied,
            swapped_out_blocks=blocks.swapped_out,
            swapped_in_blocks=blocks.swapped_in,
            cache_queries=meter.cache_queries,
            host_queries=meter.host_queries,
            host_hits=meter.host_hits,
            drafts=meter.drafts,
            draft_tokens=meter.draft_tokens,
            accepted_tokens=meter.accepted_tokens,
            rejected_requests=meter.rejected,
            corrupted_requests=meter.corrupted,
            malformed_messages=malformed_messages,
            measured=meter.snapshot(self._clock()),
        )


def _header(config: ResolvedConfig, ready: Ready, sizes: Sizes, options: Options, now_s: float) -> Header:
    """What this core is made of, for its scheduler and for the trace."""
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
    )


def _options(config: ResolvedConfig, ready: Ready, epoch: int) -> Options:
    return Options(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=ready.max_model_len,
        chunked_prefill=config.enable_chunked_prefill,
        preemption=config.preemption_mode,
        num_drafts=config.speculative_config.num_speculative_tokens if config.speculative_config else 0,
        epoch=epoch,
    )


def _with_seed(message: Generate) -> SamplingParams:
    """A client that draws no seed still gets the same tokens when it sends the same request again."""
    if message.params.seed is not None:
        return message.params
    seed = int.from_bytes(blake2b(message.request_id.encode(), digest_size=8).digest(), "little")
    return msgspec.structs.replace(message.params, seed=seed)


def _difference(known: SamplingParams, asked: SamplingParams) -> str | None:
    """The first parameter that is not the same, in words. Only numbers are shown: others may be long, or a secret."""
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
