"""EngineCore: one step is schedule, execute, update. Features hang off these three calls; none is inlined into them."""

from hashlib import blake2b
from typing import NamedTuple

import msgspec

from vllm_lite.config import EngineConfig
from vllm_lite.engine.block_pool import BlockPool
from vllm_lite.engine.kv_cache_manager import KVCacheManager
from vllm_lite.engine.prefix_hash import PrefixHasher
from vllm_lite.engine.request import Request
from vllm_lite.engine.scheduler import Produced, Scheduler
from vllm_lite.engine.stop import check_stop, stop_ids
from vllm_lite.errors import RequestError
from vllm_lite.executor.base import Executor
from vllm_lite.protocol.api import Generate, Stats
from vllm_lite.protocol.codec import unpack_tokens
from vllm_lite.protocol.control import Ready
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.step import ModelOutput


class Attached(NamedTuple):
    """An accepted Generate. `resend` are the tokens the client lacks; `done` is set if nothing is left to generate."""

    request: Request
    resend: list[int]
    done: Produced | None


class EngineCore:
    """The scheduler, its block manager and the executor, without sockets or clocks."""

    def __init__(self, config: EngineConfig, ready: Ready, executor: Executor, num_blocks: int, epoch: int) -> None:
        self._executor = executor
        self._vocab_size = ready.vocab_size
        self._eos = frozenset(ready.eos_token_ids)
        pool = BlockPool(num_blocks, config.enable_prefix_caching)
        hasher = PrefixHasher(config.block_size, config.prefix_hash_seed)
        self.kv = KVCacheManager(pool, config.block_size, hasher, config.kv_watermark)
        self.max_model_len = min(ready.max_model_len, self.kv.max_tokens)
        self.scheduler = Scheduler(
            self.kv,
            max_num_seqs=config.max_num_seqs or 64,
            max_num_batched_tokens=config.max_num_batched_tokens or 512,
            chunked_prefill=config.enable_chunked_prefill,
            epoch=epoch,
        )
        self.num_in_flight = 0

    # ---- requests

    def add(self, client: bytes, message: Generate) -> Attached:
        """Accept a request, or attach `client` to a known one. Raises RequestError; nothing else is disturbed."""
        known = self.scheduler.requests.get(message.request_id)
        if known is not None:
            return self._attach(known, client, message)
        prompt, output = self._checked_tokens("prompt", message.prompt), self._checked_tokens("output", message.output)
        if not prompt:
            raise RequestError("the prompt is empty; at least one token is needed")
        if len(output) != message.have:
            raise RequestError(f"output must hold the {message.have} tokens the client has, got {len(output)}")
        params = message.params
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=_seed_of(message.request_id))
            message = msgspec.structs.replace(message, params=params)
        request = Request(message, client, self._max_len(len(prompt), params), stop_ids(params, self._eos))
        reason = check_stop(request, output[-1]) if output else None
        if reason is not None:  # the client lacks nothing but the end
            return Attached(request, [], Produced(request, len(output), [], None, reason, None))
        self.scheduler.add(request)
        return Attached(request, [], None)

    def abort(self, request_id: str) -> Request | None:
        return self.scheduler.abort(request_id)

    def _attach(self, request: Request, client: bytes, message: Generate) -> Attached:
        if request.tokens[: request.num_prompt].tobytes() != message.prompt:
            raise RequestError(f"request id {message.request_id!r} is in use for another prompt; choose another id")
        if message.have > request.num_output:
            raise RequestError(f"{message.have} tokens were claimed, but only {request.num_output} were generated")
        request.client = client
        return Attached(request, request.tokens[request.num_prompt + message.have :].tolist(), None)

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

    def begin(self) -> bool:
        """Schedule a step and hand it to the workers. False if there is nothing to compute."""
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        self._executor.submit(plan)
        self.num_in_flight += 1
        return True

    def finish(self, output: ModelOutput) -> list[Produced]:
        """Apply the result of the oldest step in flight."""
        self.num_in_flight -= 1
        return self.scheduler.update(output)

    def stats(self) -> Stats:
        scheduler, pool, counters = self.scheduler, self.kv.pool, self.scheduler.counters
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
        )


def _seed_of(request_id: str) -> int:
    """A client that draws no seed still gets the same tokens when it sends the same request again."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest(), "little")
