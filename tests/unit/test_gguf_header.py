"""Headers of GGUF files: what is read of them, and that none of a stranger's takes long, or much, or crashes."""

import os
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from vllm_lite.checkpoint.gguf.files import first_files, gguf_files, part_names, read_files
from vllm_lite.checkpoint.gguf.header import Array, read_header
from vllm_lite.checkpoint.tensors.headers import locate, read_headers
from vllm_lite.client.engines.launch import resolve
from vllm_lite.config import EngineConfig
from vllm_lite.errors import ModelError

U8, I32, F32, BOOL, TEXT, ARRAY, U64 = 0, 5, 6, 7, 8, 9, 10
MOST_BYTES = 50 << 20


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value(name: str, kind: int, data: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + data


def texts(name: str, *values: str) -> bytes:
    return value(name, ARRAY, struct.pack("<IQ", TEXT, len(values)) + b"".join(map(text, values)))


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    """`shape` as the file has it: columns first."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(values: list[bytes], tensors: list[bytes], version: int = 3, data: int = 4096, **counts: int) -> bytes:
    numbers = counts.get("num_tensors", len(tensors)), counts.get("num_values", len(values))
    head = b"GGUF" + struct.pack("<IQQ", version, *numbers) + b"".join(values) + b"".join(tensors)
    return head + bytes(-len(head) % 32 + data)


VALUES = [
    value("general.architecture", TEXT, text("llama")),
    value("llama.block_count", I32, struct.pack("<i", 2)),
    value("scale", F32, struct.pack("<f", 0.5)),
    value("flag", BOOL, b"\1"),
    texts("tokens", "a", "", "\u732b"),
    value("types", ARRAY, struct.pack("<IQ3i", I32, 3, 1, -1, 3)),
]
TENSORS = [tensor("w", (32, 4), 0, 0), tensor("q", (32, 3), 8, 512), tensor("e", (32, 2, 2), 8, 640)]


@pytest.mark.parametrize("version", [2, 3])
def test_a_header_is_read(tmp_path: Path, version: int) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(header(VALUES, TENSORS, version))
    found = read_header(file)
    start = file.stat().st_size - 4096
    plain = {key: one for key, one in found.metadata.items() if not isinstance(one, Array)}
    assert plain == {"general.architecture": "llama", "llama.block_count": 2, "scale": 0.5, "flag": True}
    tokens, types = found.metadata["tokens"], found.metadata["types"]
    assert isinstance(tokens, Array)
    assert isinstance(types, Array)
    assert (len(tokens), tokens.texts()) == (3, ["a", "", "\u732b"])
    assert types.numbers().tolist() == [1, -1, 3]
    with pytest.raises(ModelError, match="an array of numbers is where strings are expected"):
        types.texts()
    with pytest.raises(ModelError, match="an array of strings is where numbers are expected"):
        tokens.numbers()
    assert {
        name: (one.kind.name, one.shape, one.offset - start, one.num_bytes) for name, one in found.tensors.items()
    } == {
        "w": ("F32", (4, 32), 0, 512),
        "q": ("Q8_0", (3, 32), 512, 102),
        "e": ("Q8_0", (2, 2, 32), 640, 136),
    }


NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_of_every_type_are_read(tmp_path: Path, kind: int) -> None:
    """The largest and the least of whole numbers, alone and in an array."""
    letter, file = NUMBERS[kind], tmp_path / "model.gguf"
    bits = 8 * struct.calcsize(letter)
    others: dict[str, list[Any]] = {"?": [True, False], "f": [0.5, -3.25], "d": [0.1, -1e300]}
    whole = [0, 2**bits - 1] if letter.isupper() else [-(2 ** (bits - 1)), 2 ** (bits - 1) - 1]
    numbers = others.get(letter, whole)
    single = [value(f"v{index}", kind, struct.pack(f"<{letter}", one)) for index, one in enumerate(numbers)]
    both = value("all", ARRAY, struct.pack(f"<IQ2{letter}", kind, 2, *numbers))
    file.write_bytes(header([*single, both], TENSORS))
    metadata = read_header(file).metadata
    assert [metadata["v0"], metadata["v1"]] == numbers
    assert type(metadata["v0"]) is type(numbers[0])
    found = metadata["all"]
    assert isinstance(found, Array)
    assert found.numbers().tolist() == numbers


def test_tensors_begin_at_the_alignment_that_the_file_says(tmp_path: Path) -> None:
    """Alignment and shapes of tensors, which have up to four dimensions."""
    file, alignment = tmp_path / "model.gguf", value("general.alignment", I32, struct.pack("<i", 4096))
    head = header([alignment], [tensor("w", (2, 3, 4, 5), 0, 4096)], data=0)
    file.write_bytes(head + bytes(3 * 4096))
    (found,) = read_header(file).tensors.values()
    assert (found.shape, found.offset) == ((5, 4, 3, 2), 2 * 4096)


LONG = 1 << 62
HOSTILE: dict[str, tuple[bytes, str]] = {
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n", "is the pointer of Git LFS"),
    "another magic": (b"GGML" + bytes(64), "it begins with b'GGML'"),
    "version 1": (header([], [], version=1), "is of version 1; supported: 2 and 3"),
    "version 4": (header([], [], version=4), "is of version 4; supported: 2 and 3"),
    "big endian": (header([], [], version=3 << 24), "of big-endian machines"),
    "many tensors": (header([], [], num_tensors=LONG), f"it says that it has {LONG} tensors"),
    "many values": (header([], [], num_values=LONG), f"it says that it has {LONG} values"),
    "more values than bytes": (header([], [], data=64, num_values=10_000), "it says that it has 10000 values"),
    "a long name": (header([struct.pack("<Q", LONG)], []), "'a name' has 4611686018427387904 bytes"),
    "a long string": (header([text("s") + struct.pack("<IQ", TEXT, LONG)], []), "'s' has 4611686018427387904 bytes"),
    "a name of a page": (header([value("n" * 1025, BOOL, b"\1")], []), "'a name' has 1025 bytes"),
    "a name that is not UTF-8": (header([struct.pack("<Q", 2) + b"\xff\xfe" + bytes(8)], []), "is not UTF-8"),
    "two values": (header([VALUES[1]] * 2, []), "it has two values 'llama.block_count'"),
    "an unknown value": (header([value("x", 77, b"")], []), "value 'x' has a type 77"),
    "a long array": (
        header([value("x", ARRAY, struct.pack("<IQ", I32, LONG))], []),
        f"the array 'x' has {LONG} values and the file ends before them",
    ),
    "nested arrays": (header([value("x", ARRAY, struct.pack("<IQ", ARRAY, 9))], []), "values of a type 9"),
    "strings behind the file": (
        header([value("x", ARRAY, struct.pack("<IQQ", TEXT, 2, 1 << 40))], []),
        "the array 'x' ends beyond the file",
    ),
    "an alignment of 0": (header([value("general.alignment", I32, bytes(4))], []), "general.alignment 0"),
    "an alignment of 12": (header([value("general.alignment", I32, b"\x0c\0\0\0")], []), "general.alignment 12"),
    "a huge alignment": (
        header([value("general.alignment", I32, struct.pack("<i", 1 << 21))], []),
        "general.alignment 2097152",
    ),
    "an alignment in words": (header([value("general.alignment", TEXT, text("32"))], []), "general.alignment '32'"),
    "two tensors": (header([], [TENSORS[0]] * 2), "it has two tensors 'w'"),
    "no dimensions": (header([], [tensor("w", (), 0, 0)]), "tensor 'w' has 0 dimensions"),
    "many dimensions": (header([], [tensor("w", (1,) * 5, 0, 0)]), "tensor 'w' has 5 dimensions"),
    "dimensions that overflow": (header([], [tensor("w", (1 << 32, 1 << 33), 0, 0)]), "type F32 has the shape"),
    "a dimension of 0": (header([], [tensor("w", (32, 0), 0, 0)]), r"has the shape \[0, 32\]"),
    "a row of half a block": (header([], [tensor("w", (48, 2), 8, 0)]), r"type Q8_0 has the shape \[2, 48\]"),
    "an unknown type": (header([], [tensor("w", (32, 2), 5, 0)]), "tensor 'w' has a type 5"),
    "an offset between": (header([], [tensor("w", (32, 2), 0, 8)]), "begins at 8, which is not a multiple of 32"),
    "an offset behind the file": (header([], [tensor("w", (32, 2), 0, 1 << 40)]), "is truncated"),
    "a negative offset": (header([], [tensor("w", (32, 2), 0, (1 << 64) - 32)]), "is truncated"),
    "overlapping tensors": (
        header([], [tensor("w", (32, 4), 0, 0), tensor("v", (32, 4), 0, 480)]),
        "tensors 'w' and 'v' overlap",
    ),
    "a truncated tensor": (header([], [tensor("w", (32, 64), 0, 0)], data=4096), "ends at byte 8"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_damaged_header_is_one_sentence(tmp_path: Path, name: str) -> None:
    data, expected = HOSTILE[name]
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    with pytest.raises(ModelError, match=expected) as caught:
        read_header(file)
    assert str(file) in str(caught.value)


def test_a_damaged_file_is_reported_before_its_tokenizer_is_converted(tmp_path: Path) -> None:
    """Another tokenizer would not help."""
    file = tmp_path / "model.gguf"
    file.write_bytes(HOSTILE["a truncated tensor"][0])
    with pytest.raises(ModelError, match=r"model\.gguf: tensor 'w' ends at byte .*; it is truncated$"):
        resolve(EngineConfig.check({"model": str(file)}))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"model.gguf: is not a file; a GGUF file is expected"):
        read_header(tmp_path / "model.gguf")


def test_a_file_that_ends_early_is_one_sentence(tmp_path: Path) -> None:
    whole, file = header(VALUES, TENSORS, data=800), tmp_path / "model.gguf"
    for size in range(0, len(whole) - 24, 9):  # behind the last tensor is only padding
        file.write_bytes(whole[:size])
        with pytest.raises(ModelError):
            read_header(file)


def test_strings_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(header(VALUES, TENSORS))
    monkeypatch.setattr("vllm_lite.checkpoint.gguf.header.MAX_TEXTS", 2)
    with pytest.raises(ModelError, match="with the array 'tokens' it has 3 strings; at most 2 are read"):
        read_header(file)
    file.write_bytes(header([texts("a", "x", "y"), texts("b", "z")], []))
    with pytest.raises(ModelError, match="with the array 'b' it has 3 strings; at most 2 are read"):
        read_header(file)
    file.write_bytes(header(VALUES, TENSORS))
    monkeypatch.undo()
    monkeypatch.setattr("vllm_lite.checkpoint.gguf.header.MAX_TEXT_BYTES", 40)
    with pytest.raises(ModelError, match="and its strings 42 up to there"):
        read_header(file)


@pytest.mark.parametrize(("limit", "what"), [("MAX_VALUES", "6 values"), ("MAX_TENSORS", "3 tensors")])
def test_entries_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, what: str) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(header(VALUES, TENSORS))
    monkeypatch.setattr(f"vllm_lite.checkpoint.gguf.header.{limit}", 2)
    with pytest.raises(ModelError, match=f"it says that it has {what}"):
        read_header(file)


def mutations(data: bytes, count: int) -> "list[bytes]":
    """Bits that are turned, numbers that become huge, and ends."""
    rng, found = random.Random(7), []
    for index in range(count):
        own = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8))):
            place = rng.randrange(min(len(own), 700))
            if index % 3 == 0:
                own[place] ^= 1 << rng.randrange(8)
            elif index % 3 == 1:
                own[place : place + 8] = struct.pack("<Q", rng.choice((0, 1 << 31, 1 << 40, 1 << 63, (1 << 64) - 1)))
            else:
                own = own[: max(1, place)]
        found.append(bytes(own))
    return found


def survives(file: Path, data: bytes, read: Callable[[], Any]) -> None:
    """Reading `data` gives something, or one sentence. What takes long is stopped by the test's own limit."""
    file.write_bytes(data)
    message = ""
    try:
        read()
    except ModelError as error:
        message = str(error)
    assert len(message) < 3000


def test_mutated_headers_are_model_errors_at_worst(tmp_path: Path) -> None:
    file, data = tmp_path / "model.gguf", header(VALUES, TENSORS)
    tracemalloc.start()
    try:
        for mutated in mutations(data, 400):
            survives(file, mutated, lambda: read_header(file))
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


def test_mutated_safetensors_headers_are_model_errors_at_worst(tmp_path: Path) -> None:
    import numpy as np

    file = tmp_path / "model.safetensors"
    save_file({f"w{index}": np.zeros((2, 3), np.float32) for index in range(4)}, file, {"format": "pt"})
    data = file.read_bytes()
    tracemalloc.start()
    try:
        for mutated in mutations(data, 200):
            survives(file, mutated, lambda: (read_headers(tmp_path), locate(tmp_path)))
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


def test_the_parts_of_a_split_model_are_found(tmp_path: Path) -> None:
    names = part_names("m-00002-of-00003.gguf")
    assert names == ["m-00001-of-00003.gguf", "m-00002-of-00003.gguf", "m-00003-of-00003.gguf"]
    count = value("split.count", I32, struct.pack("<i", 3))
    for index, name in enumerate(names):
        (tmp_path / name).write_bytes(header([count, VALUES[0]], [tensor(f"w{index}", (32, 4), 0, 0)]))
    (tmp_path / "mmproj-m.gguf").write_bytes(b"")
    for path in (tmp_path, tmp_path / names[1]):
        files = gguf_files(path)
        assert [file.name for file in files] == names
        assert list(read_files(files).tensors) == ["w0", "w1", "w2"]
    with pytest.raises(ModelError, match=r"is one of 3 files, as split.count says, and 1 are there"):
        read_files([tmp_path / names[0]])
    (tmp_path / names[2]).write_bytes(header([count], [tensor("w1", (32, 4), 0, 0)]))
    with pytest.raises(ModelError, match=r"tensor 'w1' is also in m-00002-of-00003.gguf"):
        read_files(gguf_files(tmp_path))
    (tmp_path / names[2]).unlink()
    with pytest.raises(ModelError, match=r"m-00003-of-00003.gguf: no such file; all 3 parts"):
        gguf_files(tmp_path)
    for wrong in ("m-00004-of-00003.gguf", "m-00001-of-99999.gguf", "m-00000-of-00000.gguf"):
        with pytest.raises(ModelError, match="is not a part of 1 to 1000 files"):
            part_names(wrong)


def test_a_folder_has_one_model(tmp_path: Path) -> None:
    assert gguf_files(tmp_path) == []
    assert gguf_files(tmp_path / "other") == []
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelError, match=r"has several models; give the file of one: a.gguf, b.gguf"):
        gguf_files(tmp_path)
    assert gguf_files(tmp_path / "b.gguf") == [tmp_path / "b.gguf"]
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert gguf_files(tmp_path) == [], "what is read everywhere wins"
    assert first_files(["x/Q8-00001-of-00002.gguf", "x/Q8-00002-of-00002.gguf", "README.md"]) == [
        "x/Q8-00001-of-00002.gguf"
    ]
    with pytest.raises(ModelError, match="cannot be read as GGUF"):
        read_header(tmp_path / "a.gguf")
