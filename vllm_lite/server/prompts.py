"""Bodies to prompts: texts, token ids, messages through the chat template."""

import asyncio
from collections.abc import Sequence
from typing import Any

from vllm_lite.client.chat_template import ChatTemplate
from vllm_lite.client.prompt import PromptLike
from vllm_lite.client.tokenizer import LONG_TEXT_CHARS, Tokenizer
from vllm_lite.errors import RequestError
from vllm_lite.server.bodies import MAX_PROMPTS, ChatBody, ChatMessage, CompletionBody, TokenizeBody
from vllm_lite.server.errors import ApiError, refused

_FORMS = "prompt must be a text, a list of texts, a list of token ids or a list of such lists"


class Prompts:
    """For one model. Every method raises ApiError."""

    def __init__(self, tokenizer: Tokenizer | None, template: ChatTemplate | None) -> None:
        self.tokenizer = tokenizer
        self._template = template

    async def of_completion(self, body: CompletionBody) -> list[PromptLike]:
        """Texts that are still to be tokenized, with special tokens, and lists of token ids."""
        prompts = _several(body.prompt)
        if body.add_special_tokens is not False or not any(isinstance(prompt, str) for prompt in prompts):
            return prompts
        tokenizer = self._needed()

        def encoded() -> list[PromptLike]:
            return [tokenizer.encode(it, add_special_tokens=False) if isinstance(it, str) else it for it in prompts]

        return await asyncio.to_thread(encoded) if are_long(prompts) else encoded()

    async def of_chat(self, body: ChatBody) -> list[int]:
        """Token ids of the prompt. Its special tokens are the template's, unless more are asked for."""
        return await self.encode(self.render(body), add_special_tokens=bool(body.add_special_tokens))

    def render(self, body: ChatBody | TokenizeBody) -> str:
        """The text of a chat, special tokens included."""
        if self._template is None:
            raise ApiError(
                400,
                "this model has no chat template; start the server with --chat-template FILE, or use /v1/completions",
                "messages",
            )
        continued = bool(body.continue_final_message)
        generated = not continued if body.add_generation_prompt is None else body.add_generation_prompt
        try:
            return self._template.render(
                _plain(body.messages or []),
                add_generation_prompt=generated,
                continue_final_message=continued,
                variables=body.chat_template_kwargs,
            )
        except RequestError as error:
            raise refused(error, "messages") from error

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        encode = self._needed().encode
        if are_long([text]):
            return await asyncio.to_thread(encode, text, add_special_tokens=add_special_tokens)
        return encode(text, add_special_tokens=add_special_tokens)

    def _needed(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer; give /v1/completions a prompt of token ids", "prompt")
        return self.tokenizer

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        if self.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer, so token ids cannot be told as text")
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


def are_long(prompts: Sequence[PromptLike]) -> bool:
    """Whether their texts are to be tokenized in a thread, so that other streams go on."""
    return sum(len(prompt) for prompt in prompts if isinstance(prompt, str)) > LONG_TEXT_CHARS


def _several(given: Any) -> list[PromptLike]:
    """One prompt or many: a list of integers is one."""
    if isinstance(given, str):
        return [given]
    kinds = {type(item) for item in given}
    if len(kinds) != 1:
        raise ApiError(400, f"{_FORMS}, got {'a mixed' if kinds else 'an empty'} list", "prompt")
    if kinds == {int}:
        return [list(given)]
    if len(given) > MAX_PROMPTS:
        raise ApiError(400, f"prompt takes at most {MAX_PROMPTS} prompts, got {len(given)}", "prompt")
    return list(given)


def _plain(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as templates know them, with one text each."""
    plain = []
    for place, message in enumerate(messages):
        for field in ("tool_calls", "tool_call_id"):
            if getattr(message, field):
                raise ApiError(400, f"messages[{place}].{field} is not supported by this server", "messages")
        name = {} if message.name is None else {"name": message.name}
        plain.append({"role": message.role, "content": text_of(message, place), **name})
    return plain


def text_of(message: ChatMessage, place: int = -1) -> str:
    """All its parts."""
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role == "assistant":
            return ""
        raise ApiError(400, f"messages[{place}].content is missing", "messages")
    texts = []
    for part in message.content:
        if part.type != "text" or part.text is None:
            raise ApiError(400, f"messages[{place}].content holds {part.type!r}; only text is supported", "messages")
        texts.append(part.text)
    return "\n".join(texts)
