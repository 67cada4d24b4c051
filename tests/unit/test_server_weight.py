"""The weight of a body: what is counted of its structure, whatever its texts hold and wherever it is cut."""

import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_lite.server.http.weight import Scale, Weight, weighed

texts = st.text(max_size=12) | st.text(alphabet='\\"{}[]:,\U0001f600\xe9\n', max_size=12)
values = st.recursive(
    texts | st.integers(-9, 9) | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


def structure(value: Any) -> tuple[int, int]:
    """Commas, and lists, objects and fields, of a value."""
    if not isinstance(value, (list, dict)):
        return 0, 0
    inner = [structure(each) for each in (value.values() if isinstance(value, dict) else value)]
    commas = sum(each[0] for each in inner) + max(0, len(value) - 1)
    return commas, sum(each[1] for each in inner) + 1 + (len(value) if isinstance(value, dict) else 0)


def in_pieces(data: bytes, size: int) -> Iterator[bytes]:
    return (data[start : start + size] for start in range(0, len(data), size))


@given(values, st.integers(1, 9), st.booleans())
def test_brackets_within_texts_are_not_counted(value: Any, size: int, ascii_only: bool) -> None:
    data = json.dumps(value, ensure_ascii=ascii_only).encode()
    scale = Scale()
    for piece in in_pieces(data, size):
        scale.feed(piece)
    assert (scale.weight.num_commas, scale.weight.num_nested) == structure(value)
    assert scale.weight.num_bytes == len(data)
    assert weighed(data)[:3] == scale.weight[:3]


@given(values, st.sampled_from(["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"]), st.integers(1, 9))
def test_other_encodings_hide_nothing(value: Any, encoding: str, size: int) -> None:
    """An escaped quote in UTF-16 is not one in bytes: a scale that took it for one would lose its place."""
    data = json.dumps(value, ensure_ascii=False).encode(encoding, "surrogatepass")
    scale = Scale()
    for piece in in_pieces(data, size):
        scale.feed(piece)
    commas, nested = structure(value)
    assert scale.weight.num_commas >= commas
    assert scale.weight.num_nested >= nested


@pytest.mark.parametrize(
    ("text", "width"),
    [("abc\n\\n", 1), ("é", 2), ("\\u00e9", 2), ("漢", 2), ("\N{GRINNING FACE}", 4), ("\\ud83d\\ude00", 4), ("\\n", 1)],
)
def test_the_widest_character_counts_for_all(text: str, width: int) -> None:
    data = f'["{"x" * 200}{text}", 1]'.encode()
    for cut in range(190, len(data)):
        scale = Scale()
        scale.feed(data[:cut])
        scale.feed(data[cut:])
        assert scale.weight.width == width
    assert weighed(data).width == width
    assert weighed(data).memory_bytes == len(data) * width + 64 + 128


@pytest.mark.parametrize(
    "value",
    ["[]", "{}", '""', "12345", '"ab"', '{"a":0}', '{"a":{}}', "[[[]]]", '{"a":"b","c":"d"}', '{"abcdefgh":[1,2,3]}'],
)
def test_no_value_takes_more_than_it_weighs(value: str) -> None:
    """Compares with the measured memory of many decoded values; objects have distinct keys."""
    many = [value.replace('"a"', f'"{number:x}"') for number in range(20_000)]
    data = f"[{','.join(many)}]".encode()
    tracemalloc.start()
    try:
        made = msgspec.json.decode(data)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(made) == 20_000
    assert taken <= 1.05 * weighed(data).memory_bytes


def test_the_weight_of_an_object_covers_its_memory() -> None:
    data = json.dumps({f"{number:x}": number for number in range(20_000)}).encode()
    tracemalloc.start()
    try:
        made = msgspec.json.decode(data)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(made) == 20_000
    assert taken <= weighed(data).memory_bytes


def test_weights_add_up() -> None:
    assert Weight(1, 2, 3, 4).plus(Weight(10, 20, 30, 1)) == Weight(11, 22, 33, 4)
