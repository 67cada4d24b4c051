"""/derender: converts answers of /inference/v1/generate, computed by another server, to those of chats and completions.

The route is stateless. A chunk of a stream comes with all earlier tokens, which are parsed again; their output was
shown before.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vllm_lite.client.streams.stream import RequestStream
from vllm_lite.protocol.api import Finished, TokenLogprobs, Tokens
from vllm_lite.protocol.stats import FinishReason
from vllm_lite.server.calls.call import Call
from vllm_lite.server.generation import Asked, Generation
from vllm_lite.server.http.application import posts
from vllm_lite.server.http.disconnect import Threads
from vllm_lite.server.live_requests import as_json
from vllm_lite.server.openai.bodies import ChatBody, ChatMessage, CompletionBody
from vllm_lite.server.openai.errors import ApiError
from vllm_lite.server.vllm.bodies import (
    DerenderChatBody,
    DerenderCompletionBody,
    Generated,
    GeneratedChoice,
    ScoredToken,
    Scores,
    StreamState,
)

_REASONS: dict[str | None, FinishReason] = {"length": "length", "abort": "abort"}
"""Finish reasons other than "stop"."""
_PLAIN_CHAT = ChatBody(messages=[ChatMessage("user", "")])
_PLAIN_COMPLETION = CompletionBody(prompt="")


class DerenderRoutes:
    """Answers both routes: one method each. Tokens are converted in a thread."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._live = generation.live
        self._ends = generation.eos_token_ids
        self._threads = Threads(1, "derender")

    def routes(self) -> list[Route]:
        return posts({"/v1/chat/completions/derender": self.chat, "/v1/completions/derender": self.completion})

    async def chat(self, request: Request) -> Response:
        asked = await self._generation.read(request, DerenderChatBody)
        body = asked.body
        of = body.chat_request or _PLAIN_CHAT
        if body.stream:
            return await self._chunk(asked, of, [body.prompt_token_ids], [body.prompt_tokens])
        if body.generate_response is None:
            text = "give generate_response, an answer of /inference/v1/generate"
            raise ApiError(400, text, "generate_response")
        return await self._whole(asked, of, [body.generate_response], [body.prompt_token_ids], [body.prompt_tokens])

    async def completion(self, request: Request) -> Response:
        asked = await self._generation.read(request, DerenderCompletionBody)
        body = asked.body
        of = body.completion_request or _PLAIN_COMPLETION
        ids, counts = body.prompt_token_ids, body.prompt_tokens
        if body.stream:
            if not all(isinstance(each, int) for each in ids or ()) or isinstance(counts, list):
                text = "a stream has one prompt; give prompt_token_ids as a list of integers and prompt_tokens as one"
                raise ApiError(400, text, "prompt_token_ids")
            return await self._chunk(asked, of, [ids], [counts])
        found = body.generate_responses
        if found is None:
            text = "give generate_responses, an answer of /inference/v1/generate for each prompt"
            raise ApiError(400, text, "generate_responses")
        each_ids = _for_each("prompt_token_ids", ids, len(found))
        return await self._whole(asked, of, found, each_ids, _for_each("prompt_tokens", counts, len(found)))

    async def _whole(
        self,
        asked: Asked[Any],
        of: ChatBody | CompletionBody,
        found: Sequence[Generated],
        prompts: Sequence[Any],
        counts: Sequence[Any],
    ) -> Response:
        """The whole answer. `found` has the generated choices of each prompt."""
        sizes = {len(each.choices) for each in found}
        if len(sizes) > 1 or 0 in sizes:
            raise ApiError(400, f"each answer needs choices, as many as the others; got {sorted(sizes)}", "choices")
        ids = [given or each.prompt_token_ids or [] for given, each in zip(prompts, found, strict=True)]
        self._check(
            [*(len(each) for each in ids), *(len(choice.token_ids or ()) for it in found for choice in it.choices)]
        )
        name, scored = found[0].request_id, _most_candidates(found)
        call = self._generation.replayed(_with(of, sizes.pop(), scored), asked.model, name, ids)

        def work(check: Callable[[], None]) -> Any:
            for stream, each in zip(call.streams, found, strict=True):
                for index, choice in enumerate(each.choices):
                    check()
                    _end(stream, index, choice, self._ends)
            return msgspec.json.decode(self._live.writers.of(call).whole())

        answer = await self._threads.run(work, asked.request.receive)
        numbers = [count if count is not None else len(it) for count, it in zip(counts, ids, strict=True)]
        usage = answer["usage"]
        usage |= {"prompt_tokens": sum(numbers), "total_tokens": sum(numbers) + usage["completion_tokens"]}
        if isinstance(of, ChatBody) and found[0].prompt_logprobs is not None:
            answer["prompt_logprobs"] = found[0].prompt_logprobs
        return as_json(answer, asked.headers)

    async def _chunk(
        self, asked: Asked[Any], of: ChatBody | CompletionBody, prompts: Sequence[Any], counts: Sequence[Any]
    ) -> Response:
        """One chunk of a stream, and the state for the next one."""
        chunk, state = asked.body.chunk, asked.body.stream_state or StreamState()
        if of.stop:
            text = "stop: a stream cannot take back what it has shown; derender it whole, or have output_mode text"
            raise ApiError(400, text, "stop")
        choice = chunk.choices[0] if chunk.choices else GeneratedChoice()
        ids, new = prompts[0] or chunk.prompt_token_ids or [], choice.token_ids or []
        self._check([len(ids) + len(state.output_token_ids) + len(new)])
        call = self._generation.replayed(_with(of, 1, _most_candidates([chunk])), asked.model, chunk.request_id, [ids])
        call.created = state.created or call.created
        answer = await self._threads.run(
            lambda _: self._written(call, state, choice if chunk.choices else None), asked.request.receive
        )
        shown = answer["choices"]
        if shown and isinstance(of, ChatBody) and not state.role_sent:
            shown[0]["delta"] = {"role": "assistant", **shown[0]["delta"]}
        for each in shown:
            each["index"] = choice.index
        if not shown and counts[0] is not None:
            numbers = {"prompt_tokens": counts[0], "completion_tokens": len(state.output_token_ids)}
            answer["usage"] = {**numbers, "total_tokens": sum(numbers.values())}
        if of.return_token_ids and chunk.prompt_token_ids is not None:
            answer["prompt_token_ids"] = chunk.prompt_token_ids
        behind = StreamState([*state.output_token_ids, *new], state.role_sent or bool(shown), call.created)
        return as_json({"chunk": answer, "stream_state": msgspec.to_builtins(behind)}, asked.headers)

    def _written(self, call: Call, state: StreamState, choice: GeneratedChoice | None) -> Any:
        """Write the output after the tokens of `state`; without a choice, only the end of the stream."""
        writer, place, stream = self._live.writers.of(call, one_chunk=True), call.choices[0], call.streams[0]
        ids = state.output_token_ids
        scores = None if stream.params.logprobs is None else Scores([ScoredToken(token_id, 0.0) for token_id in ids])
        _take(stream.apply, call.id, 0, GeneratedChoice(token_ids=ids, logprobs=scores))
        if (shown := place.delta()) is not None:
            writer.skip(place, shown)
        if choice is not None and choice.finish_reason is None:
            _take(stream.apply, call.id, 0, choice, start=len(ids))
        elif choice is not None:
            _end(stream, 0, choice, self._ends, start=len(ids))
        delta = None if choice is None else place.delta()
        data = b"" if delta is None else writer.chunk(place, delta)
        if data:
            return msgspec.json.decode(data.removeprefix(b"data: "))
        fields: dict[str, Any] = {"text": ""} if call.style.kind == "cmpl" else {"delta": {}}
        empty = [{"index": 0, **fields, "logprobs": None, "finish_reason": None}]
        head = {"id": call.id, "object": writer.chunk_object, "created": call.created, "model": call.style.model}
        return {**head, "choices": empty if choice is not None else []}

    def _check(self, lengths: Sequence[int]) -> None:
        longest, most = max(lengths, default=0), self._generation.model.max_model_len
        if longest > most:
            raise ApiError(400, f"{longest} tokens are more than max_model_len, {most}", "token_ids")


def _for_each(name: str, given: Any, count: int) -> Sequence[Any]:
    """Return one entry of field `name` for each of `count` answers. Raises ApiError."""
    if given is None:
        return [None] * count
    kind = int if name == "prompt_tokens" else list
    if (
        not isinstance(given, list)
        or len(given) != count
        or not all(it is None or isinstance(it, kind) for it in given)
    ):
        raise ApiError(400, f"{name} needs one entry for each of generate_responses, which are {count}", name)
    return given


def _most_candidates(found: Sequence[Generated]) -> int | None:
    """The largest number of candidates of a token; None if there are no logprobs."""
    tokens = [
        token for each in found for choice in each.choices if choice.logprobs for token in choice.logprobs.content or ()
    ]
    has_any = any(choice.logprobs is not None for each in found for choice in each.choices)
    return max((len(token.top_logprobs) for token in tokens), default=0) if has_any else None


def _with(of: ChatBody | CompletionBody, n: int, scored: int | None) -> Any:
    """Return the request with the numbers of choices and logprobs that were generated, and without fields that only
    generation uses."""
    common: dict[str, Any] = {"n": n, "best_of": None, "use_beam_search": None, "max_tokens": None, "min_tokens": None}
    common |= {"echo": None, "suffix": None, "logprob_token_ids": None, "stream_options": None}
    if isinstance(of, ChatBody):
        wanted = scored if of.top_logprobs is None else of.top_logprobs
        common |= {"logprobs": scored is not None, "top_logprobs": None if scored is None else wanted}
        common |= {"max_completion_tokens": None}
    else:
        common |= {"logprobs": None if scored is None else scored if of.logprobs is None else of.logprobs}
    return msgspec.structs.replace(of, **{name: value for name, value in common.items() if hasattr(of, name)})


def _take(apply: Callable[[Any], None], name: str, index: int, choice: GeneratedChoice, *, start: int = 0) -> None:
    """Apply tokens of an unfinished choice, in the format of an engine's message."""
    if ids := choice.token_ids:
        apply(Tokens(name, start, ids, logprobs=_scores(choice), index=index))


def _end(stream: RequestStream, index: int, choice: GeneratedChoice, ends: Collection[int], *, start: int = 0) -> None:
    """Apply the last tokens of a choice, and its end. A stop token is hidden, unless the request includes it in the
    output."""
    ids, reason = choice.token_ids or [], _REASONS.get(choice.finish_reason, "stop")
    stop = choice.stop_reason
    is_hidden = reason == "stop" and bool(ids) and (ids[-1] == stop or (stop is None and ids[-1] in ends))
    sent: FinishReason = "stop" if is_hidden else "length"
    stream.apply(Finished(stream.request_id, start, ids, sent, logprobs=_scores(choice), index=index))
    sample = stream.samples[index]
    if not isinstance(sample.stop_reason, str):  # a stop string in its text has been found already
        sample.finish(reason, stop)


def _scores(choice: GeneratedChoice) -> list[TokenLogprobs] | None:
    """The logprobs of a choice in the format of an engine's message. Raises ApiError."""
    if choice.logprobs is None:
        return None
    found = [_scored(token) for token in choice.logprobs.content or ()]
    if len(found) != len(choice.token_ids or ()):
        text = f"there are logprobs of {len(found)} tokens, and {len(choice.token_ids or ())} token_ids"
        raise ApiError(400, text, "logprobs")
    return found


def _scored(token: ScoredToken) -> TokenLogprobs:
    """A token's logprobs in the format of an engine's message; only candidates whose rank equals their position
    count."""
    ranked = sorted(token.top_logprobs, key=lambda each: each.rank or 0)
    top = [(it.token_id, it.logprob) for place, it in enumerate(ranked, 1) if it.rank in (None, place)]
    return TokenLogprobs(token.logprob, token.rank or 0, tuple(top))
