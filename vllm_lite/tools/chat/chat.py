"""A chat: questions, answers and /commands. The server and the screen are passed as arguments."""

import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from difflib import get_close_matches
from typing import Any, Protocol

from vllm_lite.errors import ConfigError, RemoteError, VllmLiteError
from vllm_lite.tools.chat.conversation import Conversation, Question, words_of
from vllm_lite.tools.chat.remote_server import AnswerPiece, Pieces

END_OF_MESSAGE = "."
COMMANDS = {
    "help": ("", "this list"),
    "clear": ("", "begin a new conversation"),
    "system": ("[TEXT]", "show or set the system prompt; /system none removes it"),
    "set": (
        "[NAME [VALUE]]",
        "show or set what is sampled with: /set temperature 0.7; without VALUE, the default again",
    ),
    "retry": ("", "ask the last question again, for another answer"),
    "undo": ("", "forget the last question and its answer"),
    "image": ("FILE", "the next question shows this image; several show several"),
    "multiline": ("", f"the next message has many lines and ends with one that is just {END_OF_MESSAGE!r}"),
    "stats": ("", "tokens and times of the last answer (also /tokens)"),
    "save": ("FILE", "write the conversation into a file"),
    "load": ("FILE", "go on with the conversation in a file"),
    "exit": ("", "leave (also /quit, Ctrl-D)"),
}
_ALIASES = {"tokens": "stats", "quit": "exit", "bye": "exit", "?": "help", "new": "clear"}
_ENDS = {
    "length": "the answer was cut off: it reached the greatest number of tokens",
    "abort": "the server ended the answer",
}


class ChatAnswers(Protocol):
    """A server, or a fake in tests."""

    def chat(self, messages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]) -> Pieces:
        """Stream the answer to `messages`. Closing the iterator aborts it."""


class Screen(Protocol):
    """A terminal, a pipe, or a fake in tests."""

    def write(self, text: str, *, dim: bool = False) -> None:
        """Show a piece of an answer, or (`dim`) of the reasoning before it."""

    def end(self) -> None:
        """End the answer; the next one begins on a new line."""

    def note(self, text: str) -> None:
        """Show a remark, which is not part of an answer."""

    def interruptible(self) -> AbstractContextManager[None]:
        """A block in which Ctrl-C raises KeyboardInterrupt once, however often it is pressed."""


class AnswerStats:
    """Counts and times of one answer."""

    def __init__(self) -> None:
        self.began_s = self.first_s = self.last_s = time.monotonic()
        self.num_pieces = 0
        self.usage: Mapping[str, Any] | None = None
        self.end: str | None = None

    def saw(self, piece: AnswerPiece) -> None:
        if piece.text or piece.thought:
            self.last_s = time.monotonic()
            self.num_pieces += 1
            if self.num_pieces == 1:
                self.first_s = self.last_s
        self.usage = piece.usage or self.usage
        self.end = piece.finish_reason or self.end

    def __str__(self) -> str:
        first = f"first after {(self.first_s - self.began_s) * 1e3:.0f} ms" if self.num_pieces else "none"
        seconds = self.last_s - self.first_s
        if self.usage is None:
            return f"{self.num_pieces} pieces in {self.last_s - self.began_s:.2f} s, {first}; ended early"
        prompt, count = self.usage.get("prompt_tokens", 0), self.usage.get("completion_tokens", 0)
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        known = f" ({cached} of them from the cache)" if cached is not None else ""
        rate = f", then {(count - 1) / seconds:.1f} tokens/s" if count > 1 and seconds > 0 else ""
        return f"prompt of {prompt} tokens{known}, answer of {count}: {first}{rate}; finish reason {self.end}"


class Chat:
    """A chat. line() takes lines of input until it returns False."""

    def __init__(
        self, answers: ChatAnswers, screen: Screen, conversation: Conversation, *, can_retry: bool = True
    ) -> None:
        """With `can_retry` false there is only one question, and remarks do not mention commands."""
        self.conversation = conversation
        self.stats: AnswerStats | None = None
        self.failed = False
        """Whether there was an error, which becomes the exit status if the input is a pipe."""
        self._answers = answers
        self._screen = screen
        self._can_retry = can_retry
        self._lines: list[str] | None = None

    @property
    def in_message(self) -> bool:
        """Whether the next line belongs to the same message."""
        return self._lines is not None

    def line(self, text: str) -> bool:
        """Process one line of input. Returns False for /exit."""
        if self._lines is not None:
            if text != END_OF_MESSAGE:
                self._lines.append(text)
                return True
            text, self._lines = "\n".join(self._lines), None
            self.ask(text)
        elif text.lstrip().startswith("/") and not text.startswith("//"):
            return self._command(text.lstrip())
        else:
            self.ask(text.removeprefix("/") if text.startswith("//") else text)
        return True

    def cancel_message(self) -> bool:
        """Discard the lines of an unfinished message. Returns False if there is none."""
        was, self._lines = self._lines, None
        return was is not None

    def end(self) -> None:
        """End the input. An unfinished message is sent."""
        if self._lines is not None:
            self.line(END_OF_MESSAGE)

    # ---- answers

    def ask(self, text: str) -> None:
        if text.strip():
            self.conversation.ask(text)
            self._answer()

    def _answer(self) -> None:
        """Stream the answer to the open question. What arrived is kept, even if the stream fails."""
        self.stats = stats = AnswerStats()
        said: list[str] = []
        problem = None
        with self._screen.interruptible():
            try:
                self._stream(stats, said)
            except KeyboardInterrupt:
                problem = "stopped"
            except RemoteError as error:
                self.failed = True
                problem = _with_advice(str(error))
        self.conversation.answered("".join(said))
        if said:
            self._screen.end()
        if problem is not None:
            self._screen.note(problem + self._advice(problem, has_said=bool(said)))
        elif stats.end in _ENDS:
            self._screen.note(_ENDS[stats.end])
        elif not said:
            self._screen.note("the model said nothing" + ("; /retry asks again" if self._can_retry else ""))

    def _advice(self, problem: str, *, has_said: bool) -> str:
        if not self._can_retry:
            return ""
        kept = "what was said is kept; /retry asks again" if has_said else "/retry asks again"
        return f" ({kept})" if problem == "stopped" else f"\n{kept}"

    def _stream(self, stats: AnswerStats, said: list[str]) -> None:
        with closing(self._answers.chat(self.conversation.messages(), self.conversation.sampling)) as pieces:
            for piece in pieces:
                stats.saw(piece)
                if piece.thought:
                    self._screen.write(piece.thought, dim=True)
                if piece.text:
                    said.append(piece.text)
                    self._screen.write(piece.text)

    # ---- commands

    def _command(self, text: str) -> bool:
        word, _, rest = text[1:].strip().partition(" ")
        name = _ALIASES.get(word.lower(), word.lower())
        if name not in COMMANDS:
            near = get_close_matches(name, [*COMMANDS, *_ALIASES], 1)
            advice = f"did you mean /{near[0]}?" if near else "/help lists them"
            self._fail(f"there is no command /{word}; {advice} (a message that begins with / begins with //)")
            return True
        if name == "exit":
            return False
        method: Callable[[str], None] = getattr(self, f"_{name}")
        try:
            method(rest.strip())
        except VllmLiteError as error:
            self._fail(str(error))
        return True

    def _fail(self, text: str) -> None:
        self.failed = True
        self._screen.note(text)

    def _help(self, _: str) -> None:
        words = {f"/{name} {arguments}": text for name, (arguments, text) in COMMANDS.items()}
        width = max(map(len, words))
        lines = [f"{word:<{width}}  {text}" for word, text in words.items()]
        self._screen.note("\n".join([*lines, "Ctrl-C stops an answer; at the prompt, twice, it leaves."]))

    def _clear(self, _: str) -> None:
        self.conversation.clear()
        self._screen.note("a new conversation")

    def _system(self, text: str) -> None:
        if text:
            self.conversation.system = None if text.lower() == "none" else text
        self._screen.note(f"system prompt: {self.conversation.system or 'none'}")

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if name:
            self.conversation.set(name, value.strip())
        found = [f"{name} {value!r}" for name, value in self.conversation.sampling.items()]
        self._screen.note(", ".join(found) or "nothing is set: the server's defaults")

    def _retry(self, _: str) -> None:
        if self.conversation.retry():
            self._answer()
        else:
            self._screen.note("nothing was asked yet")

    def _undo(self, _: str) -> None:
        question = self.conversation.undo()
        self._screen.note("nothing was asked yet" if question is None else f"forgotten: {_short(question)}")

    def _image(self, text: str) -> None:
        count = self.conversation.take_image(_path(text, "image"))
        self._screen.note(f"the next question shows {count} image{'s' * (count > 1)}")

    def _multiline(self, _: str) -> None:
        self._lines = []

    def _stats(self, _: str) -> None:
        self._screen.note("nothing was asked yet" if self.stats is None else str(self.stats))

    def _save(self, text: str) -> None:
        path = _path(text, "save")
        self.conversation.save(path)
        self._screen.note(f"{len(self.conversation.turns)} questions with their answers are in {path}")

    def _load(self, text: str) -> None:
        self.conversation.load(_path(text, "load"))
        turns = self.conversation.turns
        last = f"; the last was: {_short(turns[-1][0])}" if turns else ""
        self._screen.note(f"{len(turns)} questions with their answers{last}")


def _path(text: str, command: str) -> str:
    """Parse a file name, which may be quoted or begin with ~. Raises ConfigError."""
    try:
        words = shlex.split(text)
    except ValueError:
        words = [text]
    if len(words) != 1:
        raise ConfigError(f"/{command} takes the name of one file, got {text!r}; quote a name with blanks")
    return os.path.expanduser(words[0])


def _short(question: Question) -> str:
    line = " ".join(words_of(question).split())
    return line if len(line) <= 60 else f"{line[:57]}..."


def _with_advice(message: str) -> str:
    """Add advice for a chat to the server's error message."""
    if "chat template" in message:
        return f"{message}\na model without a chat template continues texts: try `vllm-lite complete`"
    if "that fit" in message or "context" in message:
        return f"{message}\n/undo or /clear makes room; /set max_tokens asks for less"
    return message
