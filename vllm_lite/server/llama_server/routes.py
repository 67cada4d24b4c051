"""/completion, /infill and /apply-template, as llama.cpp's server has them.

`/completions` stays the short form of /v1/completions: a client of OpenAI's API with a base URL without /v1 sends it.
"""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vllm_lite.server.calls.call import Call
from vllm_lite.server.calls.response import CallResponse
from vllm_lite.server.generation import Asked, Generation
from vllm_lite.server.http.application import posts
from vllm_lite.server.live_requests import as_json
from vllm_lite.server.llama_server.answers import LlamaCppWriter
from vllm_lite.server.llama_server.bodies import LlamaCppBody, LlamaCppCompletionBody, LlamaCppInfillBody
from vllm_lite.server.llama_server.completions import biases_of, fields_of, max_tokens_of, prompts_of
from vllm_lite.server.openai.bodies import ChatBody, CompletionBody
from vllm_lite.server.openai.errors import ApiError


class LlamaCppPromptRoutes:
    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._prompts = generation.prompts
        self._max_model_len = generation.model.max_model_len

    def routes(self) -> list[Route]:
        return posts({"/completion": self.completion, "/infill": self.infill, "/apply-template": self.apply_template})

    async def completion(self, request: Request) -> Response:
        asked = await self._generation.read(request, LlamaCppCompletionBody)
        prompts: Sequence[Any] = prompts_of(asked.body)
        if any(not isinstance(prompt, str) for prompt in prompts):
            parts = [[prompt] if isinstance(prompt, str) else prompt for prompt in prompts]
            prompts = await self._prompts.of_parts(parts, request)
        return await self._answered(asked, prompts)

    async def infill(self, request: Request) -> Response:
        asked = await self._generation.read(request, LlamaCppInfillBody)
        body, filler = asked.body, self._prompts.filler
        if filler is None:
            raise ApiError(400, "this model does not fill gaps: its vocabulary has no tokens for it")
        files = [(extra.filename, extra.text) for extra in body.input_extra or ()]
        most = self._max_model_len - max(1, max_tokens_of(body))
        before = (body.input_prefix, body.prompt or "")
        ids = await self._prompts.of_gap(filler, before, body.input_suffix, files, most, request)
        return await self._answered(asked, [ids], () if body.ignore_eos else filler.ends)

    async def apply_template(self, request: Request) -> Response:
        """Answer with the prompt of a chat, as text."""
        asked = await self._generation.read(request, ChatBody)
        made = await self._prompts.render(asked.body, None, request)
        return as_json({"prompt": made.text}, asked.headers)

    async def _answered(
        self, asked: Asked[Any], prompts: Sequence[str | list[int]], stop_token_ids: Sequence[int] = ()
    ) -> Response:
        """Answer `prompts`, which are all texts or all token ids."""
        body: LlamaCppBody = asked.body
        fields = fields_of(body, self._max_model_len)
        fields["logit_bias"] = await self._biases(body, asked.request)
        fields["stop_token_ids"] = list(stop_token_ids) or None
        completion = CompletionBody(prompt=list(prompts), **fields)
        made = await self._generation.completion(asked._replace(body=completion))
        call, live = made.call, self._generation.live
        texts = await self._texts(call)
        writer = LlamaCppWriter(call, live.writers.spelling, body, texts, self._max_model_len)
        return CallResponse(call, writer, live.calls.run, stream=bool(body.stream), headers=made.headers)

    async def _biases(self, body: LlamaCppBody, request: Request) -> dict[str, Any] | None:
        """The biases by token id."""
        biases = biases_of(body)
        texts = [each.key for each in biases if each.is_text]
        if texts and self._prompts.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer; keys of logit_bias must be token ids", "logit_bias")
        ids = iter(await self._prompts.of_words(texts, request))
        tokens = [(next(ids) if each.is_text else (each.key,), each.bias) for each in biases]
        return {str(token): bias for each, bias in tokens for token in each} or None

    async def _texts(self, call: Call) -> list[str]:
        """The call's prompts as texts, with special tokens; "" for a model without a tokenizer."""
        if self._prompts.tokenizer is None:
            return [""] * len(call.streams)
        ids = (stream.prompt.token_ids for stream in call.streams)
        return [await self._prompts.decode(each, skip_special_tokens=False) for each in ids]
