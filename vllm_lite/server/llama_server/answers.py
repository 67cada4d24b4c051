"""The answers of /completion and /infill: an object for each choice, or server-sent events with such an object last."""

from collections.abc import Sequence
from typing import Any

import msgspec

from vllm_lite.client.outputs import CompletionOutput
from vllm_lite.server.calls.call import Call, Choice
from vllm_lite.server.llama_server import errors
from vllm_lite.server.llama_server.bodies import LlamaCppBody
from vllm_lite.server.llama_server.completions import RANDOM_SEED, max_tokens_of
from vllm_lite.server.openai.errors import ApiError
from vllm_lite.server.openai.logprobs import Spelling, candidate, likeliest

MIN_MS = 0.001
"""The least duration: clients divide by it."""
NO_SLOT = -1


class LlamaCppWriter:
    ping = b": ping\n\n"

    def __init__(
        self, call: Call, spelling: Spelling, body: LlamaCppBody, prompts: Sequence[str], max_model_len: int
    ) -> None:
        """`prompts`: the texts of the call's prompts."""
        self._call = call
        self._spelling = spelling
        self._body = body
        self._prompts = prompts
        self._max_model_len = max_model_len
        self._params = call.streams[0].params
        self._num_tokens = [0] * len(call.choices)
        self._has_new_line = [False] * len(call.choices)

    def opening(self) -> list[bytes]:
        return []

    def chunk(self, choice: Choice, delta: CompletionOutput) -> bytes:
        """Write the new part of a choice, and at its end an event without text that has all other fields."""
        self._count(choice, delta)
        events = b""
        if delta.text or delta.token_ids:
            more = {"timings": self._timings(choice)} if self._body.timings_per_token else {}
            events = self._event(
                {
                    **self._head(choice, delta.text, delta.token_ids),
                    "stop": False,
                    "id_slot": NO_SLOT,
                    "tokens_predicted": self._num_tokens[choice.index],
                    "tokens_evaluated": len(choice.stream.prompt.token_ids),
                    **more,
                    **self._scores(delta),
                }
            )
        if delta.finish_reason is not None:
            events += self._event(self._kept({**self._head(choice, "", []), **self._end(choice, delta)}))
        return events

    def closing(self) -> list[bytes]:
        return []

    def failure(self, error: ApiError) -> bytes:
        return b"data: " + errors.body(error) + b"\n\n"

    def whole(self) -> bytes:
        """Write the object of the choice, or a list of them if there are several."""
        found = []
        for choice, delta in self._call.reading.deltas():
            self._count(choice, delta)
            ids = delta.token_ids if self._body.return_tokens else []
            fields = {**self._head(choice, delta.text, ids), **self._end(choice, delta), **self._scores(delta)}
            found.append(self._kept(fields))
        return msgspec.json.encode(found if len(self._call.choices) > 1 else found[0])

    @staticmethod
    def _event(fields: dict[str, Any]) -> bytes:
        return b"data: " + msgspec.json.encode(fields) + b"\n\n"

    def _count(self, choice: Choice, delta: CompletionOutput) -> None:
        self._num_tokens[choice.index] += len(delta.token_ids)
        self._has_new_line[choice.index] |= "\n" in delta.text

    @staticmethod
    def _head(choice: Choice, text: str, token_ids: list[int]) -> dict[str, Any]:
        return {"index": choice.index, "content": text, "tokens": token_ids}

    def _scores(self, delta: CompletionOutput) -> dict[str, Any]:
        """The probabilities of each token, if `n_probs` asks for them."""
        top = self._params.logprobs
        if top is None or not delta.logprobs:
            return {}
        tokens = []
        for candidates in delta.logprobs:
            sampled = next(iter(candidates))
            best = [{"id": other, **candidate(other, it, self._spelling)} for other, it in likeliest(candidates, top)]
            own = {"id": sampled, **candidate(sampled, candidates[sampled], self._spelling)}
            tokens.append({**own, "top_logprobs": best})
        return {"completion_probabilities": tokens}

    def _end(self, choice: Choice, delta: CompletionOutput) -> dict[str, Any]:
        """The fields of an ended choice."""
        num_tokens, num_prompt = self._num_tokens[choice.index], len(choice.stream.prompt.token_ids)
        is_word = delta.finish_reason == "stop" and isinstance(delta.stop_reason, str)
        kinds = {"stop": "word" if is_word else "eos", "length": "limit"}
        is_full = num_prompt + num_tokens >= self._max_model_len
        return {
            "id_slot": NO_SLOT,
            "stop": True,
            "model": self._call.style.model,
            "tokens_predicted": num_tokens,
            "tokens_evaluated": num_prompt,
            "generation_settings": self._settings(),
            "prompt": self._prompts[choice.index // self._params.n],
            "has_new_line": self._has_new_line[choice.index],
            "truncated": delta.finish_reason == "length" and is_full,
            "stop_type": kinds.get(str(delta.finish_reason), "none"),
            "stopping_word": delta.stop_reason if is_word else "",
            "tokens_cached": max(0, num_prompt + num_tokens - 1),
            "timings": self._timings(choice),
        }

    def _settings(self) -> dict[str, Any]:
        """The settings in effect, under the names of llama.cpp."""
        params, limit = self._params, max_tokens_of(self._body)
        biases = [{"bias": bias, "token": int(token)} for token, bias in (params.logit_bias or {}).items()]
        return {
            "seed": RANDOM_SEED if params.seed is None else params.seed,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repeat_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "stop": list(params.stop),
            "max_tokens": limit,
            "n_predict": limit,
            "ignore_eos": params.ignore_eos,
            "stream": bool(self._body.stream),
            "logit_bias": biases,
            "n_probs": params.logprobs or 0,
            "grammar": self._body.grammar or "",
            "timings_per_token": bool(self._body.timings_per_token),
            "post_sampling_probs": False,
        }

    def _timings(self, choice: Choice) -> dict[str, Any]:
        """Counts and durations; the prompt's ends with the first token, and includes the time in the queue."""
        times, num_cached = choice.stream.metrics, choice.stream.num_cached_tokens or 0
        first_s = times.first_token_time or times.arrival_time
        last_s = times.last_token_time or first_s
        num_prompt = len(choice.stream.prompt.token_ids) - num_cached
        prompt = _rates("prompt", num_prompt, first_s - times.arrival_time)
        return {
            "cache_n": num_cached,
            **prompt,
            **_rates("predicted", self._num_tokens[choice.index], last_s - first_s),
        }

    def _kept(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields that `response_fields` names, by paths like "timings/prompt_n"; all of them without it."""
        if not self._body.response_fields:
            return fields
        found = dict[str, Any]()
        for path in self._body.response_fields:
            value: Any = fields
            for name in path.split("/"):
                value = value.get(name, msgspec.UNSET) if isinstance(value, dict) else msgspec.UNSET
            if value is not msgspec.UNSET:
                found[path] = value
        return found


def _rates(what: str, count: int, seconds: float) -> dict[str, Any]:
    """A count of tokens and its time in milliseconds, alone, per token and as a rate."""
    ms = max(MIN_MS, seconds * 1000)
    per_token, rate = (ms / count if count else 0.0), 1000 * count / ms
    return {f"{what}_n": count, f"{what}_ms": ms, f"{what}_per_token_ms": per_token, f"{what}_per_second": rate}
