"""Rows of a batch, read from lines and tables: their requests, errors for invalid rows, and their order."""

import json
import random
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.batch_files import URL, line, write
from vllm_lite.errors import ConfigError
from vllm_lite.tools.batch import jsonl_file, rows
from vllm_lite.tools.batch.batch_input import open_source
from vllm_lite.tools.batch.batch_source import entries_of
from vllm_lite.tools.batch.line_bits import IdFinder, LineBits
from vllm_lite.tools.batch.prefix_order import in_prefix_order, prefix_key
from vllm_lite.tools.batch.row_mapper import RowMapper, make_mapper
from vllm_lite.tools.batch.rows import Bad, BatchRequest, Entry


def entries(path: Path | str, mapper: RowMapper | None = None) -> list[Entry]:
    source = open_source(str(path), mapper or RowMapper())
    return list(entries_of(source, source.survey()))


# ---- lines of JSON


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("{oops", "invalid_json", "not JSON"),
        ('"\udcff"', "invalid_json", "not JSON"),
        ('{"custom_id": "n", "body": {"temperature": NaN}}', "invalid_json", "not JSON"),
        ("[" * 100_000, "invalid_json", "not JSON"),
        ("[]", "invalid_request", "custom_id"),
        (line(3), "invalid_request", "custom_id"),
        (line(""), "invalid_request", "custom_id"),
        (line(method="GET"), "invalid_method", "'GET'"),
        (line(url="/v1/moderations"), "invalid_url", "/v1/moderations"),
        (line(url=["/v1/completions"]), "invalid_url", "got"),
        (line(body=[1]), "invalid_request", "[1]"),
        (line(body={"stream": True}), "invalid_request", "stream"),
    ],
)
def test_bad_lines_are_reported_and_the_rest_is_read(tmp_path: Path, text: str, code: str, words: str) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"\n" + text.encode(errors="surrogateescape") + b"\n" + line("good").encode())
    assert open_source(str(path), RowMapper()).survey().num_rows == 2
    bad, good = entries(path)
    assert isinstance(bad, Bad)
    assert (bad.line, bad.code) == (2, code)
    assert words in bad.message
    assert good == BatchRequest(3, "good", URL, {"prompt": "x"})


def test_half_a_surrogate_pair_is_replaced_as_the_server_does(tmp_path: Path) -> None:
    half, also_half = line("a", body={"prompt": "x\ud83d y"}), line("b\ud83d", body={"prompt": "z"})
    path = write(tmp_path / "in", half, also_half, line("b\ufffd"))
    first, second, third = entries(path)
    assert first == BatchRequest(1, "a", URL, {"prompt": "x\ufffd y"})
    assert second == BatchRequest(2, "b\ufffd", URL, {"prompt": "z"})
    assert isinstance(third, Bad)
    assert third.code == "duplicate_custom_id"
    row = {"custom_id": "a", "url": URL, "body": r'{"prompt": "x\ud83d y"}'}
    assert RowMapper().request(1, row) == first


def test_a_byte_order_mark_is_not_part_of_the_first_row(tmp_path: Path) -> None:
    path = write(tmp_path / "in", "\ufeff" + line("a"), line("b"), line("a"))
    assert [entry.custom_id for entry in entries(path)] == ["a", "b", None]


def test_the_first_of_two_equal_ids_counts(tmp_path: Path) -> None:
    path = write(tmp_path / "in", line("a"), line("b", url="?"), line("a"), line("b"))
    found = entries(path)
    assert [type(entry) for entry in found] == [BatchRequest, Bad, Bad, Bad]
    assert [entry.custom_id for entry in found] == ["a", "b", None, None]
    assert isinstance(found[2], Bad)
    assert found[2].code == "duplicate_custom_id"


def test_a_line_that_is_too_long_is_bad_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl_file, "MAX_LINE_BYTES", 200)
    monkeypatch.setattr(jsonl_file, "CHUNK_BYTES", 64)
    short, long = line("a"), line("b", body={"prompt": "x" * 500})
    exact = line("c")
    exact = line("c", body={"prompt": "x" * (1 + 199 - len(exact))})
    assert len(exact) == 199  # the newline is the 200th
    path = write(tmp_path / "in", short, long, exact, line("d"))
    assert [(entry.line, entry.custom_id, isinstance(entry, Bad)) for entry in entries(path)] == [
        (1, "a", False),
        (2, None, True),
        (3, "c", False),
        (4, "d", False),
    ]


def test_a_digest_is_of_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl_file, "MAX_LINE_BYTES", 50)
    monkeypatch.setattr(jsonl_file, "CHUNK_BYTES", 8)
    digests = set()
    for text in ("a", "b", "a ", "x" * 90 + "a", "x" * 90 + "b"):
        digests.add(open_source(write(tmp_path / "in", text), RowMapper()).survey().digest)
    assert len(digests) == 5


def test_line_bits_and_repeated_ids_agree_with_sets() -> None:
    draw = random.Random(0)
    bits, finder, kept, seen, repeats = LineBits(), IdFinder(), set[int](), set[str](), set[int]()
    for number in range(1, 3000):
        name = f"r{draw.randrange(2000)}"
        finder.add(number, name)
        if name in seen:
            repeats.add(number)
        seen.add(name)
        chosen = draw.randrange(20_000)
        bits.add(chosen)
        kept.add(chosen)
    assert {number for number in range(25_000) if number in bits} == kept
    assert bits.count == len(kept)
    found = finder.repeated()
    assert {number for number in range(3000) if number in found} == repeats


# ---- tables


def table(path: Path, **columns: list[Any]) -> str:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table(columns), path)
    return str(path)


def test_a_table_of_requests(tmp_path: Path) -> None:
    bodies = [{"prompt": "x", "max_tokens": 3}, {"prompt": "y", "max_tokens": None}, None]
    path = table(tmp_path / "in.parquet", custom_id=["a", "b", "a"], url=[URL, URL, URL], body=bodies)
    first, second, third = entries(path)
    assert first == BatchRequest(1, "a", URL, {"prompt": "x", "max_tokens": 3})
    assert second == BatchRequest(2, "b", URL, {"prompt": "y"})  # the struct's empty key is none of the request's
    assert isinstance(third, Bad)
    assert third.custom_id is None
    texts = ['{"prompt": "x", "user": null}', "{oops", "[1]"]
    path = table(tmp_path / "texts.parquet", custom_id=["a", "b", "c"], body=texts)
    first, second, third = entries(path, make_mapper(URL, None, None, '{"max_tokens": 2, "prompt": "z"}'))
    assert first == BatchRequest(1, "a", URL, {"max_tokens": 2, "prompt": "x", "user": None})
    assert isinstance(second, Bad)
    assert (second.code, second.custom_id) == ("invalid_json", "b")
    assert isinstance(third, Bad)
    assert "object" in third.message


def test_a_table_of_prompts(tmp_path: Path) -> None:
    path = table(tmp_path / "in.parquet", prompt=["x", "", None], other=[1, 2, 3])
    first, second, third = entries(path, make_mapper(None, None, None, '{"max_tokens": 2}'))
    assert first == BatchRequest(1, "row-1", "/v1/completions", {"max_tokens": 2, "prompt": "x"})
    for bad, name in ((second, "row-2"), (third, "row-3")):
        assert isinstance(bad, Bad)
        assert (bad.custom_id, bad.message) == (name, "the prompt is empty")
    messages = [[{"role": "user", "content": "hello", "name": None}]]
    path = table(tmp_path / "chat.parquet", messages=messages, key=[7])
    (chat,) = entries(path, make_mapper(None, None, "key", None))
    body = {"messages": [{"role": "user", "content": "hello"}]}
    assert chat == BatchRequest(1, "7", "/v1/chat/completions", body)
    path = table(tmp_path / "question.parquet", question=["why?"], custom_id=["q"])
    (asked,) = entries(path, make_mapper("/v1/chat/completions", "question", None, None))
    assert asked == BatchRequest(1, "q", "/v1/chat/completions", {"messages": [{"role": "user", "content": "why?"}]})
    (vector,) = entries(path, make_mapper("/v1/embeddings", "question", None, None))
    assert vector == BatchRequest(1, "q", "/v1/embeddings", {"input": "why?"})


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((None, None, None, None), ["none of the columns", "answer, question"]),
        ((None, "text", None, None), ["no column 'text'", "--prompt-column"]),
        ((None, None, "key", None), ["no column 'key'"]),
        ((None, "question", "question", None), ["has ids in the column 'question'", "--prompt-column"]),
        (("/score", None, None, None), ["body", "/score"]),
    ],
)
def test_the_error_for_missing_columns_names_the_existing_ones(
    tmp_path: Path, flags: tuple[str | None, ...], words: list[str]
) -> None:
    path = table(tmp_path / "in.parquet", question=["x"], answer=["y"])
    with pytest.raises(ConfigError) as raised:
        entries(path, make_mapper(*flags))
    assert all(word in str(raised.value) for word in words)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("/v1/moderations", None, None, None), "--endpoint must be one of /v1/chat/completions"),
        (("/score", "text", None, None), "--endpoint must be one of /v1/chat/completions"),
        ((None, None, None, "{oops"), "--body must be JSON"),
        ((None, None, None, "[1]"), "--body must be a JSON object"),
        ((None, None, None, '{"stream": true}'), "without stream"),
    ],
)
def test_settings_of_tables_are_checked(flags: tuple[str | None, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_mapper(*flags)


def test_settings_of_tables_are_not_for_lines(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lines of JSON say it all themselves"):
        open_source(write(tmp_path / "in", line()), make_mapper(None, "question", None, None))


def test_a_value_that_json_has_not_is_a_bad_row(tmp_path: Path) -> None:
    path = table(tmp_path / "in.parquet", prompt=[b"bytes"])
    (bad,) = entries(path)
    assert isinstance(bad, Bad)
    assert "cannot be sent" in bad.message


def test_another_file_is_no_table(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with pytest.raises(ConfigError, match="cannot be read as Parquet"):
        open_source(write(tmp_path / "in.parquet", line()), RowMapper())


@pytest.mark.parametrize(
    ("path", "library", "extra"), [("in.parquet", "pyarrow", "parquet"), ("datasets:x", "datasets", "datasets")]
)
def test_a_missing_library_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, path: str, library: str, extra: str
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=rf"pip install 'vllm-lite\[{extra}\]'"):
        open_source(path, RowMapper())


class _Rows(list[dict[str, Any]]):
    """A split as the library `datasets` gives it."""

    @property
    def column_names(self) -> list[str]:
        return list(self[0])

    def select_columns(self, names: list[str]) -> "_Rows":
        return _Rows({name: row[name] for name in names} for row in self)


def test_a_data_set_by_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, dict[str, str]]] = []

    def load_dataset(path: str, **options: str) -> _Rows:
        asked.append((path, options))
        if path == "gone":
            raise FileNotFoundError("no such data set\nand more")
        return _Rows({"question": f"q{place}", "answer": "a"} for place in range(3))

    module = ModuleType("datasets")
    monkeypatch.setattr(module, "load_dataset", load_dataset, raising=False)
    monkeypatch.setitem(sys.modules, "datasets", module)
    mapper = make_mapper(None, "question", None, None)
    found = entries("datasets:org/name?name=main&split=test", mapper)
    assert found[2] == BatchRequest(3, "row-3", "/v1/completions", {"prompt": "q2"})
    assert asked == [("org/name", {"name": "main", "split": "test"})]
    assert open_source("datasets:x", mapper).survey().digest == open_source("datasets:y", mapper).survey().digest
    assert asked[-1] == ("y", {"split": "train"})
    with pytest.raises(ConfigError, match=r"datasets:gone cannot be loaded: FileNotFoundError: no such data set$"):
        open_source("datasets:gone", mapper)
    with pytest.raises(ConfigError, match="'splitt'; known are name, split, revision"):
        open_source("datasets:x?splitt=test", mapper)


# ---- the order


def ask(number: int, text: str, **body: Any) -> BatchRequest:
    return BatchRequest(number, str(number), URL, {"prompt": text, **body})


def test_rows_with_common_prefixes_are_sent_together() -> None:
    draw = random.Random(1)
    topics = [f"{place:03}" + "t" * 300 for place in range(20)]
    given = [ask(number, topics[number % 20] + f" question {number}") for number in range(400)]
    draw.shuffle(given)
    placed = list(in_prefix_order(given, 400))
    assert sorted(entry.line for entry in placed) == sorted(entry.line for entry in given)
    changes = sum(one.line % 20 != other.line % 20 for one, other in pairwise(placed))
    assert changes == 19
    untouched = list(in_prefix_order(given, 0))
    assert untouched == given


def test_a_window_limits_the_rows_read_ahead() -> None:
    taken = 0

    def rows_() -> Any:
        nonlocal taken
        for number in range(10_000):
            taken += 1
            yield ask(number, "x" * (10_000_000 if number > 100 else 10))

    placed = in_prefix_order(rows_(), 50)
    next(placed)
    assert taken == 50
    for _ in range(99):
        next(placed)
    assert taken == 100
    next(placed)
    assert taken < 112  # 64 MiB of them


def test_prompts_differ_at_once_where_nothing_is_shared() -> None:
    messages = [{"role": "system", "content": "s" * 200}, {"role": "user", "content": "hello"}]
    chat = {"messages": messages}
    one = BatchRequest(1, "1", "/v1/chat/completions", chat)
    swapped = {"messages": [dict(reversed(list(message.items()))) for message in messages]}
    salted = BatchRequest(2, "2", "/v1/chat/completions", {**chat, "cache_salt": "s"})
    key = prefix_key(one)
    assert key == prefix_key(BatchRequest(3, "3", "/v1/chat/completions", swapped))
    shared = sum(one == other for one, other in zip(key[:60], prefix_key(salted), strict=False))
    assert shared < 60
    decisions = [
        BatchRequest(number, str(number), "/v1/systemone", {"instructions": "i", "state": state, "questions": {}})
        for number, state in enumerate(["two", "one", {"a": 1}])
    ]
    assert [entry.line for entry in in_prefix_order(decisions, 3)] == [1, 0, 2]
    tokens = [ask(1, "", prompt=[5, 300]), ask(2, "", prompt=[5, 7]), ask(3, "", prompt=[4])]
    assert [entry.line for entry in in_prefix_order(tokens, 3)] == [3, 2, 1]


def test_failures_have_their_line() -> None:
    made = rows.failure(Bad(7, None, "invalid_json", "no"))
    assert made["error"] == {"code": "invalid_json", "message": "no", "line": 7}
    assert json.loads(json.dumps(made))["custom_id"] is None
