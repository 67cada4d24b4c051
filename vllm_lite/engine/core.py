"""EngineCore: one step is schedule, execute, update. Features hang off these three calls; none is inlined into them."""

import time
from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from vllm_lite import __version__
from vllm_lite.config import EngineConfig
from vllm_lite.engine import branching
from vllm_lite.engine.assembly import assemble
from vllm_lite.engine.cache_reset import reset_cache
from vllm_lite.engine.describe import describe
from vllm_lite.engine.pace import Pace
from vllm_lite.engine.plan import Options, Produced
from vllm_lite.engine.prefix_hash import PrefixHasher
from vllm_lite.engine.recording import Recorder
from vllm_lite.engine.request import Request
from vllm_lite.engine.sequence import Sequence
from vllm_lite.engine.stop import check_stop, stop_ids
from vllm_lite.errors import RequestError
from vllm_lite.executor.base import Executor
from vllm_lite.protocol.api import Descriptions, ForkRequest, Generate, PrefixCacheReset, Stats
from vllm_lite.protocol.codec import unpack_tokens
from vllm_lite.protocol.control import Ready
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.step import ModelOutput, SchedulerOutput
from vllm_lite.trace.records import Header

MIN_TIMED_TOKENS = 32
"""Smaller steps say nothing of the rate at which prompts are computed."""
RATE_WEIGHT = 0.2
MAX_PROMPT_SCORES = 1 << 21
"""Logprobs of one prompt, so that a message holds them: about 32 MiB."""


class Attached(NamedTuple):
    """An accepted Generate. `resend` are the tokens the client lacks; `done` is set if nothing is left to generate."""

    request: Request
    resend: list[int]
    done: Produced | None


class Sizes(NamedTuple):
    """What the pools hold, in blocks, and how fast blocks move between them."""

    num_blocks: int
    num_host_blocks: int = 0
    swap_blocks_per_s: float = 0.0


class _Step(NamedTuple):
    """One that is under way."""

    sent_s: float
    num_tokens: int
    only_decodes: bool


class EngineCore:
    """The scheduler, its block manager and the executor, without sockets. Reads time from `clock` only."""

    def __init__(
        self,
        config: EngineConfig,
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
        self._steps_sent: deque[_Step] = deque()
        self._unsent: list[SchedulerOutput] = []
        self._pace = Pace()
        # What a drafting sequence computes next depends on its last step, so a second one would be half empty.
        self.max_in_flight = 2 if config.async_scheduling and config.speculative_config is None else 1
        header = _header(config, ready, sizes, _options(config, ready, epoch), clock())
        self.scheduler = assemble(header, PrefixHasher(config.block_size, config.prefix_hash_seed))
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
        prompt, output = (
            self._checked_tokens("prompt", message.prompt),
            self._checked_tokens("output", message.output),
        )
        if not prompt:
            raise RequestError("the prompt is empty; at least one token is needed")
        if len(output) != message.have:
            raise RequestError(f"output must hold the {message.have} tokens the client has, got {len(output)}")
        if output and (message.params.n > 1 or message.params.use_beam_search):
            raise RequestError("a request with several samples starts from its prompt; send no output with it")
        request = self._make_request(client, message, len(prompt))
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

    def abort(self, request_id: str, *, stopped: bool = False) -> Request | None:
        """`stopped`: its client has all it wanted."""
        self.meter.now_s = self._clock()
        request = self.scheduler.abort(request_id, "stop" if stopped else "abort")
        if request is not None and self.recorder is not None:
            self.recorder.aborted(request, self._clock())
        return request

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
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=_seed_of(message.request_id))
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
        if request.num_samples > 1 or request.beam or request.params.prompt_logprobs is not None:
            raise RequestError(
                f"request {message.request_id!r} has several samples or prompt_logprobs and cannot be attached to again"
            )
        if message.have > sequence.num_output:
            raise RequestError(f"{message.have} tokens were claimed, but only {sequence.num_output} were generated")
        request.client = client
        return Attached(request, sequence.tokens[request.num_prompt + message.have :].tolist(), None)

    def _checked_tokens(self, what: str, data: bytes) -> list[int]:
        if len(data) % 4:
            raise RequestError(f"{what} must be u32 token ids, got {len(data)} bytes, which is not a multiple of 4")
        tokens = unpack_tokens(data)
        if tokens and max(tokens) >= self._vocab_size:
            raise RequestError(f"token ids must be below {self._vocab_size}, the {what} holds {max(tokens)}")
        return tokens

    def _max_len(self, num_prompt: int, params: SamplingParams) -> int:
        """Where the sequence ends at the latest."""
        longest = self.max_model_len
        if num_prompt >= longest:
            raise RequestError(
                f"the prompt has {num_prompt} tokens; at most {longest - 1} leave room for one of output "
                f"(context and KV cache hold {longest})"
            )
        if params.max_tokens is None:
            return longest
        if num_prompt + params.max_tokens > longest:
            raise RequestError(
                f"the prompt's {num_prompt} tokens and max_tokens={params.max_tokens} are "
                f"{num_prompt + params.max_tokens - longest} more than the {longest} that fit; "
                f"ask for at most {longest - num_prompt}"
            )
        return num_prompt + params.max_tokens

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
            self._steps_sent.append(_Step(now_s, num_tokens, only_decodes))
        if self._unsent and (plan is None or not only_decodes or len(self._unsent) >= self._pace.steps):
            unsent, self._unsent = self._unsent, []
            self._executor.submit(*unsent)
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
        step = self._steps_sent.popleft()
        self._measure(now_s - step.sent_s, step.num_tokens)
        if self.max_in_flight > 1:
            self._pace.ended(now_s, steady=step.only_decodes and self.num_in_flight > 0)
        if self.recorder is not None:
            return self.recorder.update(output, now_s)
        return self.scheduler.update(output)

    def _measure(self, took_s: float, num_tokens: int) -> None:
        """Learn how fast prompts are computed, from steps that ran alone."""
        if num_tokens >= MIN_TIMED_TOKENS and not self.num_in_flight and took_s > 0:
            old, new = self.scheduler.rates.prefill_tokens_per_s, num_tokens / took_s
            rate = new if not old else (1 - RATE_WEIGHT) * old + RATE_WEIGHT * new
            self.scheduler.rates = self.scheduler.rates._replace(prefill_tokens_per_s=rate)
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


def _header(config: EngineConfig, ready: Ready, sizes: Sizes, options: Options, now_s: float) -> Header:
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


def _options(config: EngineConfig, ready: Ready, epoch: int) -> Options:
    return Options(
        max_num_seqs=config.max_num_seqs or 64,
        max_num_batched_tokens=config.max_num_batched_tokens or 512,
        max_model_len=ready.max_model_len,
        chunked_prefill=config.enable_chunked_prefill,
        preemption=config.preemption_mode,
        num_drafts=config.speculative_config.num_speculative_tokens if config.speculative_config else 0,
        epoch=epoch,
    )


def _seed_of(request_id: str) -> int:
    """A client that draws no seed still gets the same tokens when it sends the same request again."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest(), "little")
