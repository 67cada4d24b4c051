"""A chat without a terminal and without a server: messages, commands, interrupts, files."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from vllm_lite.errors import ConfigError, RemoteError
from vllm_lite.tools.chat.chat import COMMANDS, Chat
from vllm_lite.tools.chat.conversation import Conversation
from vllm_lite.tools.chat.remote_server import AnswerPiece, Pieces

USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}


class FakeAnswers:
    """Streams the texts of `script`, raises its exceptions, and records the questions."""

    def __init__(self) -> None:
        self.script: list[str | BaseException] = ["one ", "two"]
        self.end: str = "stop"
        self.asked: list[list[dict[str, Any]]] = []
        self.sampling: dict[str, Any] = {}
        self.num_open = 0
        self.streams: list[Pieces] = []

    def chat(self, messages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]) -> Pieces:
        stream = self._chat(messages, sampling)
        self.streams.append(stream)  # so that none is closed by being forgotten
        return stream

    def _chat(self, messages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]) -> Pieces:
        self.asked.append([dict(message) for message in messages])
        self.sampling = dict(sampling)
        self.num_open += 1
        try:
            for part in self.script:
                if isinstance(part, BaseException):
                    raise part
                yield AnswerPiece(part)
            yield AnswerPiece(finish_reason=self.end)
            yield AnswerPiece(usage=USAGE)
        finally:
            self.num_open -= 1


class FakeScreen:
    def __init__(self) -> None:
        self.answers = ""
        self.notes: list[str] = []
        self.interrupt_at: str | None = None

    def write(self, text: str, *, dim: bool = False) -> None:
        self.answers += f"({text})" if dim else text
        if text == self.interrupt_at:
            raise KeyboardInterrupt

    def end(self) -> None:
        self.answers += "|"

    def note(self, text: str) -> None:
        self.notes.append(text)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        yield


class Rig:
    def __init__(self) -> None:
        self.answers = FakeAnswers()
        self.screen = FakeScreen()
        self.chat = Chat(self.answers, self.screen, Conversation())

    def say(self, *lines: str) -> None:
        for line in lines:
            assert self.chat.line(line), line

    @property
    def said(self) -> list[tuple[str, Any]]:
        return [(message["role"], message["content"]) for message in self.chat.conversation.messages()]

    @property
    def note(self) -> str:
        return self.screen.notes[-1]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    assert rig.answers.num_open == 0, "an answer was left open"


def test_every_question_has_the_earlier_messages(rig: Rig) -> None:
    rig.say("first", "", "  ", "second")
    assert rig.screen.answers == "one two|one two|"
    assert [message["content"] for message in rig.answers.asked[1]] == ["first", "one two", "second"]
    assert rig.said[-1] == ("assistant", "one two")
    assert rig.screen.notes == []
    assert not rig.chat.failed


def test_an_interrupt_ends_the_answer_and_keeps_its_text(rig: Rig) -> None:
    rig.screen.interrupt_at = "one "
    rig.say("first")
    assert rig.answers.num_open == 0
    assert rig.said == [("user", "first"), ("assistant", "one ")]
    assert rig.note.startswith("stopped")
    rig.screen.interrupt_at = None
    rig.say("/retry")
    assert rig.said == [("user", "first"), ("assistant", "one two")]
    assert rig.answers.asked[1] == [{"role": "user", "content": "first"}]


def test_an_interrupt_before_the_first_word_leaves_a_question_that_can_be_asked_again(rig: Rig) -> None:
    rig.say("zero")
    rig.answers.script = [KeyboardInterrupt()]
    rig.say("first")
    rig.answers.script = ["yes"]
    rig.say("another")
    assert rig.said[2:] == [("user", "another"), ("assistant", "yes")]
    rig.answers.script = [KeyboardInterrupt()]
    rig.say("third")
    rig.answers.script = ["no"]
    rig.say("/retry")
    assert rig.said[4:] == [("user", "third"), ("assistant", "no")]


def test_a_server_that_dies_is_said_and_the_conversation_is_kept(rig: Rig) -> None:
    rig.say("first")
    rig.answers.script = ["half", RemoteError("the server went away")]
    rig.say("second")
    assert "the server went away" in rig.note
    assert rig.chat.failed
    assert rig.said == [("user", "first"), ("assistant", "one two"), ("user", "second"), ("assistant", "half")]
    rig.answers.script = [RemoteError("no server answers")]
    rig.say("/retry")
    rig.answers.script = ["whole"]
    rig.say("/retry")
    assert rig.said[2:] == [("user", "second"), ("assistant", "whole")]


def test_a_refusal_is_shown_with_a_remedy(rig: Rig) -> None:
    rig.answers.script = [RemoteError("this model has no chat template; start the server with ...")]
    rig.say("hello")
    assert "vllm-lite complete" in rig.note
    rig.answers.script = [RemoteError("the prompt's 2100 tokens are 52 more than the 2048 that fit")]
    rig.say("hello")
    assert "/clear" in rig.note


def test_ends_that_are_not_the_models_are_said(rig: Rig) -> None:
    rig.answers.end = "length"
    rig.say("hello")
    assert "cut off" in rig.note
    rig.answers.script = []
    rig.answers.end = "stop"
    rig.say("hello")
    assert "said nothing" in rig.note


def test_undo_and_clear(rig: Rig) -> None:
    rig.say("first", "second", "/undo")
    assert [text for _, text in rig.said] == ["first", "one two"]
    assert "second" in rig.note
    rig.say("/system be brief", "/set top_k 3", "/clear")
    assert rig.said == [("system", "be brief")]
    assert rig.chat.conversation.sampling == {"top_k": 3}
    rig.say("/undo")
    assert "nothing was asked" in rig.note
    rig.say("/retry")
    assert "nothing was asked" in rig.note
    assert len(rig.answers.asked) == 2


def test_the_system_prompt_is_the_first_message(rig: Rig) -> None:
    rig.say("/system be kind", "hello")
    assert rig.answers.asked[0][0] == {"role": "system", "content": "be kind"}
    rig.say("/system")
    assert "be kind" in rig.note
    rig.say("/system none", "/clear", "hello")
    assert rig.answers.asked[1] == [{"role": "user", "content": "hello"}]


def test_settings_are_sent_with_each_question(rig: Rig) -> None:
    rig.say("/set temperature 0.7", "/set stop END", '/set bad_words ["a", "b"]', "/set ignore_eos true", "hello")
    assert rig.answers.sampling == {"temperature": 0.7, "stop": "END", "bad_words": ["a", "b"], "ignore_eos": True}
    rig.say(" /set temperature", "/set stop none", "hello")
    assert set(rig.answers.sampling) == {"bad_words", "ignore_eos"}
    rig.say("/set")
    assert "bad_words" in rig.note


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/set temprature 1", ["temprature", "did you mean temperature"]),
        ("/set temperature hot", ["temperature"]),
        ("/set temperature -1", ["temperature", "-1"]),
        ("/set n 3", ["'n'"]),
        ("/sytem x", ["/sytem", "did you mean /system"]),
        ("/home/me/file is what?", ["/home/me/file", "//"]),
        ("/save", ["one file"]),
        ("/load a b", ["one file", "a b"]),
        ("/load /no/such/file", ["/no/such/file", "No such file"]),
        ("/image /no/such/file", ["/no/such/file", "No such file"]),
        ("/image", ["one file"]),
    ],
)
def test_invalid_commands_are_explained_and_send_nothing(rig: Rig, line: str, words: list[str]) -> None:
    rig.say(line)
    assert all(word in rig.note for word in words), rig.note
    assert rig.answers.asked == []
    assert rig.chat.conversation.sampling == {}
    assert rig.chat.failed


def test_two_slashes_are_a_message(rig: Rig) -> None:
    rig.say("//exit is a word")
    assert rig.said[0] == ("user", "/exit is a word")


@pytest.mark.parametrize("word", ["/exit", "/quit", "/bye", "/EXIT"])
def test_leaving(rig: Rig, word: str) -> None:
    assert not rig.chat.line(word)


def test_help_names_every_command(rig: Rig) -> None:
    rig.say("/help")
    assert all(f"/{name}" in rig.note for name in COMMANDS)
    assert all(callable(getattr(rig.chat, f"_{name}")) for name in COMMANDS if name != "exit")


def test_stats(rig: Rig) -> None:
    rig.say("/stats")
    assert "nothing was asked" in rig.note
    rig.say("hello", "/tokens")
    assert "prompt of 7 tokens (4 of them from the cache), answer of 3" in rig.note
    assert "first after" in rig.note
    rig.screen.interrupt_at = "one "
    rig.say("hello", "/stats")
    assert "ended early" in rig.note


def test_many_lines_are_one_message(rig: Rig) -> None:
    rig.say("/multiline", "one", "/help", "", "three")
    assert rig.chat.in_message
    assert rig.answers.asked == []
    rig.say(".", "after")
    assert [text for role, text in rig.said if role == "user"] == ["one\n/help\n\nthree", "after"]
    rig.say("/multiline", "lost")
    assert rig.chat.cancel_message()
    assert not rig.chat.cancel_message()
    rig.say("/multiline", "the end of input")
    rig.chat.end()
    assert rig.said[-2] == ("user", "the end of input")


def test_the_next_question_shows_images(rig: Rig, tmp_path: Path) -> None:
    """Images precede the text of one question only, and are undone and saved with it."""
    for name, data in (("a b.png", b"png"), ("c.jpg", b"jpeg"), ("none", b"")):
        (tmp_path / name).write_bytes(data)
    rig.say(f"/image '{tmp_path}/a b.png'")
    assert rig.note == "the next question shows 1 image"
    rig.say(f"/image {tmp_path}/c.jpg")
    assert rig.note == "the next question shows 2 images"
    rig.say(f"/image {tmp_path}/none")
    assert "has no bytes" in rig.note
    rig.say("compare them", "and now?")
    urls = ["data:image/png;base64,cG5n", "data:image/jpeg;base64,anBlZw=="]
    shown: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    question = [*shown, {"type": "text", "text": "compare them"}]
    assert [content for role, content in rig.said if role == "user"] == [question, "and now?"]
    rig.say(f"/save {tmp_path}/talk.json", "/clear", f"/load {tmp_path}/talk.json", "/undo")
    assert [content for role, content in rig.said if role == "user"] == [question]
    rig.say("/undo")
    assert rig.note == "forgotten: [2 images] compare them"
    rig.say(f"/image {tmp_path}/c.jpg", "/clear", "hello")
    assert rig.said[0] == ("user", "hello")


def test_a_conversation_is_saved_and_loaded(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "my chat.json"
    rig.say("/system be kind", "/set seed 5", "first", "second", f"/save '{path}'", f"/save '{path}'")
    assert not rig.chat.failed
    before = rig.said
    saved = json.loads(path.read_text())
    assert saved["seed"] == 5
    assert saved["messages"][0] == {"role": "system", "content": "be kind"}
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]
    other = Rig()
    other.say("something else", f"/load '{path}'")
    assert other.said == before
    assert other.chat.conversation.sampling == {"seed": 5}
    assert "second" in other.note


@pytest.mark.parametrize(
    "text",
    [
        "no json",
        "[]",
        "{}",
        '{"messages": [{"role": "user"}]}',
        '{"messages": [{"role": "user", "content": "a"}]}',
        '{"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]}',
        '{"messages": [{"role": "user", "content": 1}, {"role": "assistant", "content": "b"}]}',
    ],
)
def test_other_files_are_neither_loaded_nor_replaced(rig: Rig, tmp_path: Path, text: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    rig.say("first")
    before = rig.said
    rig.say(f"/load {path}")
    assert str(path) in rig.note
    assert rig.said == before
    rig.say(f"/save {path}")
    assert "choose another name" in rig.note
    assert path.read_text() == text


def test_a_file_that_cannot_be_written_is_said(rig: Rig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="/no/such"):
        rig.chat.conversation.save("/no/such/folder/file")
    rig.chat.conversation.system = "\udcff"  # from the command line
    with pytest.raises(ConfigError, match="surrogates not allowed"):
        rig.chat.conversation.save(f"{tmp_path}/talk.json")
