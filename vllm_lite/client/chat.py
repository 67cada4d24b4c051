"""Chats in Python: messages through the checkpoint's template, and a tokenizer under transformers' names."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_lite.client.prompt import encode
from vllm_lite.client.text.templates.chat_template import ChatTemplate, Tool, with_read_arguments
from vllm_lite.client.text.templates.left_out import described
from vllm_lite.client.text.templates.message_parts import MAY_BE_EMPTY, TakeImage, read_parts, reasoning_fields
from vllm_lite.client.text.templates.template_trials import Message
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.errors import ModelError, RequestError
from vllm_lite.runtime import log

Conversation = Sequence[Message]
"""The messages, the oldest first."""

logger = log.get(__name__)


class ChatTokenizer:
    """A checkpoint's tokenizer and chat template. Methods have the names and defaults of transformers."""

    def __init__(self, tokenizer: Tokenizer | None, folder: str | Path, eos_token_ids: Sequence[int] = ()) -> None:
        """The template is read from `folder` when it is needed. Raises ModelError without a tokenizer."""
        if tokenizer is None:
            raise ModelError(f"{folder} has no tokenizer; give token ids to generate()")
        self._tokenizer = tokenizer
        self._folder = Path(folder)
        self._template: ChatTemplate | None = None
        self.eos_token_ids = tuple(eos_token_ids)
        self.vocab_size = tokenizer.vocab_size

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def eos_token_id(self) -> int | None:
        """The first of the model's end tokens."""
        return self.eos_token_ids[0] if self.eos_token_ids else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokenize `text`. Raises RequestError if it is not valid Unicode."""
        return encode(text, self._tokenizer, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: Conversation,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tools: Sequence[Tool] | None = None,
        chat_template: str | Path | None = None,
        **variables: Any,
    ) -> str | list[int]:
        """Make the prompt for `conversation`, as token ids or as text; `variables` are the template's.

        `tools` are those that the model may call: {"type": "function", "function": {"name": ..., "parameters": ...}}.

        `chat_template` replaces the checkpoint's: Jinja, or a file with it. Raises RequestError or ModelError.
        """
        text = rendered(
            self.template(chat_template),
            conversation,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
            tools=checked_tools(tools),
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text  # the template added them

    def template(self, given: str | Path | None = None) -> ChatTemplate:
        """Get the checkpoint's template, or compile the given one (Jinja or a file). Raises ModelError for none."""
        template = self.find_template(given)
        if template is None:
            raise ModelError(f"{self._folder} has no chat template; give one as chat_template, or use generate()")
        return template

    def find_template(self, given: str | Path | None = None) -> ChatTemplate | None:
        """See template(); returns None if there is none."""
        if given is not None:
            return ChatTemplate.load(self._folder, given)
        self._template = self._template or ChatTemplate.load(self._folder)
        return self._template


def rendered(
    template: ChatTemplate, conversation: Conversation, take_image: TakeImage | None = None, **settings: Any
) -> str:
    """Render a conversation by ChatTemplate.rendering(), and log a warning of what is not in the prompt."""
    made = template.rendering(plain_messages(conversation, take_image), **settings)
    if made.left_out:
        logger.warning("%s", described(made.left_out))
    return made.text


def checked_tools(tools: Any) -> Sequence[Tool] | None:
    """Return `tools` if each is a dict. Raises RequestError."""
    if tools is not None and not (isinstance(tools, Sequence) and all(isinstance(each, Mapping) for each in tools)):
        raise RequestError(f"tools must be a list of dicts with a type and a function, got {str(tools)[:100]!r}")
    return tools


def conversations(messages: Any) -> list[Conversation]:
    """Make a list of one conversation or several. Raises RequestError."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise RequestError(f"messages must be a list of messages or of such lists, got {type(messages).__name__}")
    return [messages] if messages and isinstance(messages[0], Mapping) else list(messages)


def plain_messages(messages: Conversation, take_image: TakeImage | None = None) -> list[Message]:
    """Make messages as ChatTemplate takes them, each with a text or parts. Raises RequestError for a bad one, and for
    images if nobody takes them."""
    if not isinstance(messages, Sequence) or not messages:
        raise RequestError(f"a conversation must be a list of at least one message, got {str(messages)[:100]!r}")
    return [_plain(message, place, take_image) for place, message in enumerate(messages)]


def _plain(message: Message, place: int, take_image: TakeImage | None) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{place}] must be a dict with a role and a content, got {str(message)[:100]!r}")
    if message.get("tool_calls"):
        message = {**message, "tool_calls": with_read_arguments(message["tool_calls"])}
    content = message.get("content")
    if isinstance(content, str):
        return message
    if content is None and message["role"] in MAY_BE_EMPTY:
        refusal = message.get("refusal")
        return {**message, "content": refusal if isinstance(refusal, str) else ""}
    if not isinstance(content, list):
        raise RequestError(f"messages[{place}].content must be a text or a list of parts, got {type(content).__name__}")
    found = read_parts(content, f"messages[{place}].content", take_image)
    thought = reasoning_fields(found.reasoning, calls_behind_text=bool(message.get("tool_calls") and found.text))
    return {**thought, **message, "content": found.for_template}
