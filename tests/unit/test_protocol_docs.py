"""docs/protocol.md says what the messages are, now."""

import json
import sys
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import protocol_docs  # noqa: E402 - found only once scripts/ is on the path

from tests.unit.test_protocol import MESSAGES  # noqa: E402
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


@pytest.mark.parametrize(("codec", "message"), MESSAGES, ids=lambda value: type(value).__name__)
def test_the_schema_knows_every_message(codec: object, message: msgspec.Struct) -> None:
    """As far as one can see without a validator: tag, number and names of the fields."""
    definitions = json.loads((ROOT / "docs/protocol.schema.json").read_text())["$defs"]
    schema = definitions[type(message).__name__]
    sent = msgspec.json.decode(msgspec.json.encode(message))
    assert schema["prefixItems"][0]["enum"] == [sent[0]]
    assert schema["minItems"] <= len(sent) <= schema["maxItems"]
    assert [item["title"] for item in schema["prefixItems"]] == ["tag", *type(message).__struct_fields__]


def test_check_tells_a_stale_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["protocol_docs.py", "--check"])
    assert protocol_docs.main() == 0
    monkeypatch.setattr(protocol_docs, "files", lambda: {ROOT / "docs/protocol.md": "other"})
    assert protocol_docs.main() == 1
    assert "run `make protocol`" in capsys.readouterr().out
