"""POST /debug/prefix: which blocks of a prompt are cached, and why the first other one is not."""

import asyncio
from array import array
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.errors import EngineError
from vllm_lite.protocol.api import Generate, GetPrefix
from vllm_lite.protocol.view import NearestPrompt, PrefixSeen
from vllm_lite.server.calls.call import Call
from vllm_lite.server.calls.registry import PROBE_TIMEOUT_S
from vllm_lite.server.generation import Generation
from vllm_lite.server.http.application import posts
from vllm_lite.server.http.auth import require_watcher
from vllm_lite.server.http.body import top_level
from vllm_lite.server.live_requests import as_json
from vllm_lite.server.openai.bodies import ChatBody, CompletionBody
from vllm_lite.server.openai.errors import ApiError

PATH = "/debug/prefix"
TIERS = (None, "device", "host", "disk")

_WHY = {
    "caching_is_off": "prefix caching is off, or the model keeps nothing that prompts could share",
    "prompt_is_scored": "with prompt_logprobs the whole prompt is computed",
    "all_cached": "more cannot be: only full blocks of {size} tokens are kept, and the last token is always computed",
    "being_computed": "a live request is computing block {block}, which has the same tokens",
    "not_continuable": "the KV of block {block} is cached, but nothing can continue there: a recurrent state, which is "
    "kept at marks, or the KV of a sliding window is missing",
    "evicted": "block {block}, which an earlier prompt had, was evicted, or that request ended before computing it",
    "cache_was_emptied": "block {block}, which an earlier prompt had, was dropped when the cache was emptied",
    "other_keys": "block {block} was computed only with another cache_salt or adapter",
    "differs": "block {block} differs at token {token:,}: {here} where the nearest cached prompt has {there}",
    "longer": "the nearest cached prompt ends at token {token:,}; what follows was never computed",
    "unknown": "no remembered prompt reaches block {block}: it was never computed, or too long ago to tell",
}


class PrefixRoutes:
    """Answers senders that may see everybody's requests, as an answer shows tokens of other prompts."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._calls = generation.live.calls

    def routes(self) -> list[Route]:
        return posts({PATH: self.prefix})

    async def prefix(self, request: Request) -> Response:
        """Answer for the body of a chat or of a completion, without generating."""
        require_watcher(request)
        data, fields = await top_level(await self._generation.live.reader.receive(request))
        if "messages" in fields:
            made = await self._generation.chat(await self._generation.asked(request, data, ChatBody))
        else:
            made = await self._generation.completion(await self._generation.asked(request, data, CompletionBody))
        if len(made.call.streams) != 1:
            raise ApiError(400, f"give one prompt, got {len(made.call.streams)}", "prompt")
        engine, seen = await self._ask(made.call)
        if seen.error is not None:
            raise ApiError(400, seen.error)
        tokenizer = self._generation.prompts.tokenizer
        return as_json(explanation(engine, seen, made.call.streams[0].prompt.token_ids, tokenizer), made.headers)

    async def _ask(self, call: Call) -> tuple[int, PrefixSeen]:
        """Ask the engine that would get the call now. Raises ApiError."""
        session, message = self._calls.dispatcher.session, call.message(0)
        if not isinstance(message, Generate):
            raise TypeError(f"a call that was not started has a prompt, got {type(message).__name__}")
        try:
            engine = session.engine_for(message, call.affinity)
            asked = session.ask_one(engine, GetPrefix(message), PrefixSeen)
            return engine, await asyncio.wait_for(asyncio.wrap_future(asked), PROBE_TIMEOUT_S)
        except (TimeoutError, EngineError) as error:
            why = error if isinstance(error, EngineError) else f"not within {PROBE_TIMEOUT_S:g} s"
            raise ApiError(503, f"the engine does not answer: {why}") from error


def explanation(engine: int, seen: PrefixSeen, token_ids: Sequence[int], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The JSON object of an answer. Neighbouring blocks with equal states are one entry of `blocks`."""
    difference = None
    if seen.nearest is not None and seen.nearest.num_common < seen.num_prompt:
        difference = _difference(seen.nearest, token_ids, tokenizer)
    return {
        "engine": engine,
        "num_tokens": seen.num_prompt,
        "block_size": seen.block_size,
        "num_cached_tokens": seen.num_cached,
        "num_tokens_on_disk": seen.num_on_disk,
        "num_hit_blocks": seen.num_hit_blocks,
        "blocks": _blocks(seen),
        "miss": seen.miss,
        "why": _why(seen, difference),
        "difference": difference,
    }


def _blocks(seen: PrefixSeen) -> list[dict[str, Any]]:
    size, found = seen.block_size, list[dict[str, Any]]()
    states = ((number < seen.num_hit_blocks, TIERS[tier]) for number, tier in enumerate(seen.tiers))
    first = 0
    for (is_hit, tier), group in groupby(states):
        end = first + len(list(group))
        tokens = [first * size, end * size]
        found.append({"blocks": [first, end], "tokens": tokens, "hit": is_hit, "tier": tier})
        first = end
    return found


def _difference(nearest: NearestPrompt, token_ids: Sequence[int], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Both prompts around their first difference. A token is null behind the end of its prompt."""
    at, start, there = nearest.num_common, nearest.start, array("I", nearest.context).tolist()
    here = list(token_ids[start : start + len(there) + 1])
    split = at - start
    return {
        "token": at,
        "request_id": nearest.external_id or nearest.request_id,
        "before": _text(here[:split], tokenizer),
        "here": _side(here[split:], tokenizer),
        "there": _side(there[split:], tokenizer),
    }


def _side(token_ids: list[int], tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    """A token, and the text behind it."""
    if not token_ids:
        return None
    return {
        "id": token_ids[0],
        "text": _text(token_ids[:1], tokenizer),
        "after": _text(token_ids[1:], tokenizer),
    }


def _text(token_ids: list[int], tokenizer: Tokenizer | None) -> str | None:
    return None if tokenizer is None else tokenizer.decode(token_ids, skip_special_tokens=False)


def _why(seen: PrefixSeen, difference: dict[str, Any] | None) -> str:
    """The answer in a sentence."""
    on_disk = f", {seen.num_on_disk:,} more are on disk" if seen.num_on_disk else ""
    shown = difference or {"token": 0, "here": None, "there": None}
    reason = _WHY[seen.miss].format(
        block=seen.num_hit_blocks,
        size=seen.block_size,
        token=shown["token"],
        here=_named(shown["here"]),
        there=_named(shown["there"]),
    )
    return f"{seen.num_cached:,} of {seen.num_prompt:,} tokens are cached{on_disk}; {reason}"


def _named(side: dict[str, Any] | None) -> str:
    if side is None:
        return "its end"
    return f"token {side['id']}" if side["text"] is None else repr(side["text"])
