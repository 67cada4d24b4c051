"""docs/protocol.md agrees with the messages."""

import json
import sys
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import protocol_docs  # noqa: E402 - found only once scripts/ is on the path
import protocol_example  # noqa: E402

from tests.unit.test_protocol import MESSAGES  # noqa: E402
from vllm_lite.protocol import PROTOCOL_VERSION, codec  # noqa: E402
from vllm_lite.protocol.api import Finished, Generate, Hello, Tokens  # noqa: E402
from vllm_lite.protocol.codec import unpack_tokens  # noqa: E402
from vllm_lite.protocol.params import SamplingParams  # noqa: E402


def test_the_files_are_current() -> None:
    for path, text in protocol_docs.files().items():
        assert path.read_text() == text, f"{path.name} is out of date; run `make protocol`"


def test_every_message_and_every_field_is_there() -> None:
    page = (ROOT / "docs/protocol.md").read_text()
    sections = {text.split("\n", 1)[0]: text for text in page.split("\n### ")[1:]}
    for _, message in MESSAGES:
        section = sections[type(message).__name__]
        for place, field in enumerate(type(message).__struct_fields__, 1):
            assert f"| {place} | `{field}` |" in section
    for field in SamplingParams.__struct_fields__:
        assert f"| `{field}` |" in sections["SamplingParams"]


@pytest.mark.parametrize(("of", "message"), MESSAGES, ids=lambda value: type(value).__name__)
def test_the_schema_knows_every_message(of: object, message: msgspec.Struct) -> None:
    """Compares tag, number and names of the fields; there is no validator."""
    definitions = json.loads((ROOT / "docs/protocol.schema.json").read_text())["$defs"]
    schema = definitions[type(message).__name__]
    sent = msgspec.json.decode(msgspec.json.encode(message))
    assert schema["prefixItems"][0]["enum"] == [sent[0]]
    assert schema["minItems"] <= len(sent) <= schema["maxItems"]
    assert [item["title"] for item in schema["prefixItems"]] == ["tag", *type(message).__struct_fields__]


def frames() -> list[tuple[str, bytes]]:
    """The messages that the page has in bytes, each with the array above them."""
    section = (ROOT / "docs/protocol.md").read_text().split("## A conversation in bytes")[1].split("\n## ")[0]
    found = [block.strip().split("\n", 1) for block in section.split("```")[1::2]]
    return [(shown, bytes.fromhex(digits)) for shown, digits in found]


def test_the_documented_bytes_are_those_that_are_sent() -> None:
    """By the engine's own decoder, and by the encoder of any client."""
    hello, welcome, generate, tokens, finished = frames()
    assert codec.client_to_engine.decode(hello[1]) == Hello(PROTOCOL_VERSION)
    request = codec.client_to_engine.decode(generate[1])
    assert isinstance(request, Generate)
    assert list(unpack_tokens(request.prompt)) == [1, 40, 41, 42]
    assert (request.params.max_tokens, request.params.temperature) == (3, 0.0)
    assert codec.engine_to_client.decode(welcome[1]) == protocol_example.WELCOME
    batches = [codec.engine_to_client.decode(frame) for _, frame in (tokens, finished)]
    assert batches == [protocol_example.TOKENS, protocol_example.FINISHED]
    for shown, frame in frames():
        assert shown == protocol_example.notation(msgspec.msgpack.decode(frame))
        assert msgspec.msgpack.encode(msgspec.msgpack.decode(frame)) == frame


def test_the_page_has_the_place_of_the_sample() -> None:
    page = " ".join((ROOT / "docs/protocol.md").read_text().split())
    assert "`index`, the sample, is at place 5 of Tokens and at place 9 of Finished" in page
    for message, place in ((Tokens("a", 0, [7], index=3), 5), (Finished("a", 0, [7], "stop", index=3), 9)):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message))[place] == 3


def test_check_tells_a_stale_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["protocol_docs.py", "--check"])
    assert protocol_docs.main() == 0
    monkeypatch.setattr(protocol_docs, "files", lambda: {ROOT / "docs/protocol.md": "other"})
    assert protocol_docs.main() == 1
    assert "run `make protocol`" in capsys.readouterr().out
