"""The state of a chat: questions, answers and settings. Independent of server and terminal."""

import base64
import json
import mimetypes
import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from vllm_lite.client.media.sources import MAX_FILE_BYTES
from vllm_lite.errors import ConfigError

Question = str | list[dict[str, Any]]
"""A text, or the parts of a content: images, followed by a text."""

ROLES = ("user", "assistant")
_NOT_HERE = {"n", "best_of", "detokenize", "logprobs", "prompt_logprobs", "bad_words_token_ids", "grammar", "thinking"}
"""Fields of SamplingParams without meaning in a chat, which has one answer, shown as text; and fields that only the
protocol has."""
_ALSO = ("chat_template_kwargs", "reasoning_effort")


class Conversation:
    """The questions with their answers, and the sampling params. `asked` is the last question while it has no answer;
    retry() asks it again. `images` are those of the next question."""

    def __init__(self, system: str | None = None, sampling: Mapping[str, Any] | None = None) -> None:
        self.system = system
        self.sampling = dict(sampling or {})
        self.turns: list[tuple[Question, str]] = []
        self.asked: Question | None = None
        self.images: list[dict[str, Any]] = []

    def messages(self) -> list[dict[str, Any]]:
        """The messages of a request: questions and answers so far, and the open question."""
        said = self._said()
        return said if self.asked is None else [*said, {"role": "user", "content": self.asked}]

    def ask(self, question: str) -> None:
        self.asked = [*self.images, {"type": "text", "text": question}] if self.images else question
        self.images = []

    def take_image(self, path: str) -> int:
        """Add an image file to the next question. Returns its number of images. Raises ConfigError."""
        try:
            with open(path, "rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"{path!r} cannot be read: {error.strerror or error}") from error
        if not data or len(data) > MAX_FILE_BYTES:
            raise ConfigError(f"{path!r} has {'no' if not data else f'more than {MAX_FILE_BYTES}'} bytes")
        kind = mimetypes.guess_type(path)[0] or ""
        kind = kind if kind.startswith("image/") else "image/png"  # the server detects the format
        url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        self.images.append({"type": "image_url", "image_url": {"url": url}})
        return len(self.images)

    def answered(self, answer: str) -> None:
        """Store an answer, complete or not. An empty one is not stored; its question can be asked again."""
        if answer and self.asked is not None:
            self.turns.append((self.asked, answer))
            self.asked = None

    def retry(self) -> bool:
        """Ask the last question again. Returns False if there is none."""
        if self.asked is None:
            if not self.turns:
                return False
            self.asked, _ = self.turns.pop()
        return True

    def undo(self) -> Question | None:
        """Remove the last question with its answer. Returns the question, None if there is none."""
        question, self.asked = self.asked, None
        if question is None and self.turns:
            question, _ = self.turns.pop()
        return question

    def clear(self) -> None:
        """Remove all questions and answers; settings are kept."""
        self.turns.clear()
        self.asked, self.images = None, []

    def set(self, name: str, text: str) -> None:
        """Set a sampling param from `text`; "none" or an empty text unsets it. Raises ConfigError."""
        from vllm_lite.protocol.params import SamplingParams  # takes 20 ms, for a rare command

        known = [*(set(SamplingParams.__struct_fields__) - _NOT_HERE), *_ALSO]
        if name not in known:
            near = get_close_matches(name, known, 1)
            what = f"did you mean {near[0]}?" if near else "there are temperature, top_p, top_k, max_tokens, seed, ..."
            raise ConfigError(f"there is no {name!r} to set; {what}")
        if text.lower() in ("", "none", "null"):
            self.sampling.pop(name, None)
            return
        value = plain(text)
        if name in SamplingParams.__struct_fields__:
            as_list = name in ("stop", "bad_words") and isinstance(value, str)
            checked: dict[str, Any] = {name: [value] if as_list else value}
            try:
                SamplingParams(**checked)
            except (ValueError, TypeError) as error:
                raise ConfigError(str(error)) from error
        self.sampling[name] = value

    # ---- files

    def save(self, path: str) -> None:
        """Write the chat as JSON that is a valid request body. Raises ConfigError; never replaces another kind of
        file."""
        if os.path.exists(path):
            try:
                Conversation().load(path)
            except ConfigError as error:
                raise ConfigError(f"{path!r} is there and holds no conversation; choose another name") from error
        text = json.dumps({"messages": self._said(), **self.sampling}, ensure_ascii=False, indent=1)
        new = f"{path}.new"
        try:
            data = f"{text}\n".encode()
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(data)
            os.replace(new, path)
        except (OSError, UnicodeEncodeError) as error:
            raise ConfigError(f"{path!r} cannot be written: {getattr(error, 'strerror', None) or error}") from error

    def load(self, path: str) -> None:
        """Continue a chat written by save(). If it raises ConfigError, nothing has changed."""
        try:
            given = json.loads(Path(path).read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path!r} cannot be read: {getattr(error, 'strerror', None) or error}") from error
        try:
            said = [(str(entry["role"]), entry["content"]) for entry in given.pop("messages")]
        except (LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path!r} holds no conversation: no messages of role and content") from error
        system = said.pop(0)[1] if said and said[0][0] == "system" else None
        is_even = [role for role, _ in said] == list(ROLES) * (len(said) // 2)
        known = all(isinstance(text, str) or (role == "user" and _is_question(text)) for role, text in said)
        if not is_even or not known or not isinstance(system, str | None):
            raise ConfigError(f"{path!r} holds no conversation: user and assistant do not speak by turns")
        self.system, self.sampling, self.asked = system, given, None
        self.turns = [(said[at][1], said[at + 1][1]) for at in range(0, len(said), 2)]

    def _said(self) -> list[dict[str, Any]]:
        """Messages of the system prompt, and of each question and answer."""
        found: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        for question, answer in self.turns:
            found += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return found


def _is_question(content: Any) -> bool:
    """Whether `content` is a list of parts with types, the last of them a text."""
    if not isinstance(content, list) or not all(isinstance(part, dict) and "type" in part for part in content):
        return False
    return bool(content) and isinstance(content[-1].get("text"), str)


def words_of(question: Question) -> str:
    """The text of a question, preceded by the number of its images."""
    if isinstance(question, str):
        return question
    count = len(question) - 1
    return f"[{count} image{'s' * (count > 1)}] {question[-1]['text']}"


def plain(text: str) -> Any:
    """Parse 0.7, true or ["a", "b"] as JSON; any other text is kept."""
    try:
        return json.loads(text)
    except ValueError:
        return text
