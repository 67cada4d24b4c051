"""The state of a chat: questions, answers and settings. It knows neither server nor terminal."""

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
"""A text, or the parts of a content: images, and a text behind them."""

ROLES = ("user", "assistant")
_NOT_HERE = {"n", "best_of", "detokenize", "logprobs", "prompt_logprobs", "bad_words_token_ids", "grammar", "thinking"}
"""Fields of SamplingParams without meaning in a chat, which has one answer, shown as text; and those of the wire."""
_ALSO = ("chat_template_kwargs", "reasoning_effort")


class Conversation:
    """The questions with their answers, and what to sample with.

    `asked` is the last question, as long as it has no answer; retry() asks it again. `images` are those of the next
    one.
    """

    def __init__(self, system: str | None = None, sampling: Mapping[str, Any] | None = None) -> None:
        self.system = system
        self.sampling = dict(sampling or {})
        self.turns: list[tuple[Question, str]] = []
        self.asked: Question | None = None
        self.images: list[dict[str, Any]] = []

    def messages(self) -> list[dict[str, Any]]:
        """The messages of a request: all that was said, and the question that waits for its answer."""
        said = self._said()
        return said if self.asked is None else [*said, {"role": "user", "content": self.asked}]

    def ask(self, question: str) -> None:
        """Ask a question, with the images that were taken for it."""
        self.asked = [*self.images, {"type": "text", "text": question}] if self.images else question
        self.images = []

    def take_image(self, path: str) -> int:
        """Take an image file for the next question. Returns how many it has now. Raises ConfigError."""
        try:
            with open(path, "rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"{path!r} cannot be read: {error.strerror or error}") from error
        if not data or len(data) > MAX_FILE_BYTES:
            raise ConfigError(f"{path!r} has {'no' if not data else f'more than {MAX_FILE_BYTES}'} bytes")
        kind = mimetypes.guess_type(path)[0] or ""
        kind = kind if kind.startswith("image/") else "image/png"  # the server looks at the bytes
        url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        self.images.append({"type": "image_url", "image_url": {"url": url}})
        return len(self.images)

    def answered(self, answer: str) -> None:
        """Keep an answer, whole or not. An empty one is not kept; its question can be asked again."""
        if answer and self.asked is not None:
            self.turns.append((self.asked, answer))
            self.asked = None

    def retry(self) -> bool:
        """Ask the last question again. False if there was none."""
        if self.asked is None:
            if not self.turns:
                return False
            self.asked, _ = self.turns.pop()
        return True

    def undo(self) -> Question | None:
        """Forget the last question with its answer. Returns the question, None if there was none."""
        question, self.asked = self.asked, None
        if question is None and self.turns:
            question, _ = self.turns.pop()
        return question

    def clear(self) -> None:
        """Forget what was said, but not what is set."""
        self.turns.clear()
        self.asked, self.images = None, []

    def set(self, name: str, text: str) -> None:
        """Set a sampling param from `text`; "none" or an empty text unsets it. Raises ConfigError."""
        from vllm_lite.protocol.params import SamplingParams  # takes 20 ms, for a command that few use

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
        """Write JSON that a server would take as a body. Raises ConfigError; never replaces another kind of file."""
        if os.path.exists(path):
            try:
                Conversation().load(path)
            except ConfigError as error:
                raise ConfigError(f"{path!r} is there and holds no conversation; choose another name") from error
        text = json.dumps({"messages": self._said(), **self.sampling}, ensure_ascii=False, indent=1)
        new = f"{path}.new"
        try:
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(text + "\n")
            os.replace(new, path)
        except OSError as error:
            raise ConfigError(f"{path!r} cannot be written: {error.strerror or error}") from error

    def load(self, path: str) -> None:
        """Go on with what save() has written. Raises ConfigError, and then changes nothing."""
        try:
            given = json.loads(Path(path).read_text())
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
        """The system prompt, and each question with its answer."""
        found: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        for question, answer in self.turns:
            found += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return found


def _is_question(content: Any) -> bool:
    """Whether these are parts with a type, the last of which is a text."""
    if not isinstance(content, list) or not all(isinstance(part, dict) and "type" in part for part in content):
        return False
    return bool(content) and isinstance(content[-1].get("text"), str)


def words_of(question: Question) -> str:
    """The text of a question; its images are counted before it."""
    if isinstance(question, str):
        return question
    count = len(question) - 1
    return f"[{count} image{'s' * (count > 1)}] {question[-1]['text']}"


def plain(text: str) -> Any:
    """Read 0.7, true or ["a", "b"] as JSON, and keep any other text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text
