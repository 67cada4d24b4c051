"""Files from strangers: no reader of checkpoints hangs, fills the memory, or repeats their contents in errors."""

import json
import os
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests import tokenizers_for_tests as made
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.tensors import headers, lora
from vllm_lite.checkpoint.tensors.headers import locate_in
from vllm_lite.client.generation_config import generation_defaults
from vllm_lite.client.text.response import choose
from vllm_lite.client.text.templates.template_source import TemplateSource
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.errors import ModelError, RequestError
from vllm_lite.kernels.cuda.compiler import Compiled, read_entry, write_entry
from vllm_lite.runtime.untrusted_files import first_untrusted, read_bounded

TERABYTE = 2**40


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(TERABYTE)


def folder(path: Path) -> None:
    path.mkdir()


HOSTILE = [pipe, endless, sparse, folder]


@pytest.mark.parametrize("make", HOSTILE)
def test_only_small_regular_files_are_read(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "file")
    with pytest.raises(OSError, match=r"directory|not a file|more than the \d+ bytes"):
        read_bounded(tmp_path / "file")


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    assert read_bounded(path, 100) == bytes(100)
    with pytest.raises(OSError, match="more than the 99 bytes"):
        read_bounded(path, 99)
    with pytest.raises(FileNotFoundError):
        read_bounded(tmp_path / "none")


READERS: dict[str, Callable[[Path], object]] = {
    "config.json": load_spec,
    "adapter_config.json": lora.read_lora,
    "generation_config.json": generation_defaults,
    "tokenizer.json": Tokenizer.load,
    "tokenizer_config.json": TemplateSource.load,
    "chat_template.jinja": TemplateSource.load,
    "model.safetensors": headers.read_headers,
    "model.safetensors.index.json": headers.weight_files,
}


@pytest.mark.parametrize("make", HOSTILE)
@pytest.mark.parametrize("name", READERS)
def test_no_reader_hangs(name: str, make: Callable[[Path], None], tmp_path: Path) -> None:
    """A file that is no small regular file is refused, or is as good as missing, and takes no memory."""
    make(tmp_path / name)
    tracemalloc.start()
    with suppress(ModelError):
        READERS[name](tmp_path)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 4_000_000


def test_the_own_format_of_a_checkpoint_is_read_so_too(tmp_path: Path) -> None:
    sparse(tmp_path / "tokenizer_config.json")
    with pytest.raises(ModelError, match="more than the"):
        choose.choose(tmp_path, Tokenizer(made.byte_level()))


# ---- owners


def test_files_that_others_can_change_are_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    assert first_untrusted([tmp_path, file]) is None
    tmp_path.chmod(0o777)
    assert first_untrusted([tmp_path, file]) == tmp_path
    tmp_path.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    if file.stat().st_uid:  # root's files are trusted
        assert first_untrusted([file]) == file
    elif os.getuid() == 0:
        os.chown(file, 4321, 4321)
        assert first_untrusted([tmp_path, file]) == file


def test_a_kernel_of_another_user_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "kernels" / "a.cubin"
    assert write_entry(path, Compiled(b"cubin", "symbol"))
    assert read_entry(path) == Compiled(b"cubin", "symbol")
    path.parent.chmod(0o777)
    assert read_entry(path) is None
    path.parent.chmod(0o700)
    assert read_entry(path) is not None


# ---- contents


def write_header(path: Path, header: bytes, num_bytes: int = 0) -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(num_bytes))
    return path


@pytest.mark.parametrize(
    "shape",
    ["9" * 200_000, ",".join(["999999999999"] * 200_000), "1,1,1,1,1,1,1,1,2", "-1,2", "281474976710657"],
    ids=["a long number", "many dimensions", "nine", "negative", "too large"],
)
def test_a_shape_is_small(shape: str, tmp_path: Path) -> None:
    header = f'{{"weight":{{"dtype":"F32","shape":[{shape}],"data_offsets":[0,8]}}}}'.encode()
    path = write_header(tmp_path / "model.safetensors", header, 8)
    begin_s = time.thread_time()
    with pytest.raises(ModelError, match=r"model\.safetensors") as error:
        locate_in(path)
    assert time.thread_time() - begin_s < 1.0
    assert len(str(error.value)) < 1000


def test_an_adapter_is_checked_before_it_is_read(tmp_path: Path) -> None:
    """A sparse file may hold matrices of any size: what is not the model's is never read."""
    size = 2**38
    entries = {
        f"base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight": {
            "dtype": "BF16",
            "shape": shape,
            "data_offsets": [place * size * 2, (place + 1) * size * 2],
        }
        for place, (part, shape) in enumerate({"A": [1, size], "B": [size, 1]}.items())
    }
    path = write_header(tmp_path / "adapter_model.safetensors", json.dumps(entries).encode())
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + 4 * size)
    (tmp_path / "adapter_config.json").write_text('{"peft_type":"LORA","r":1,"lora_alpha":1}')
    (module,) = lora.read_lora(tmp_path).modules.values()
    assert module.down.num_bytes == 2 * size  # Site.check refuses it by its shape


@pytest.mark.parametrize(
    "patterns",
    [{rf"layers\.{index}\.(?:a|b){{1,3}}": 1 for index in range(20_000)}, {r"(.+?)+?\1\1[!?]": 1}],
    ids=["many", "slow"],
)
def test_patterns_of_an_adapter_take_a_second_at_the_most(patterns: dict[str, int], tmp_path: Path) -> None:
    entries = {
        f"base_model.model.model.layers.{layer}.{'a' * 60}.lora_{part}.weight": {
            "dtype": "F32",
            "shape": [1, 1],
            "data_offsets": [0, 4],
        }
        for part in "AB"
        for layer in range(10)
    }
    write_header(tmp_path / "adapter_model.safetensors", json.dumps(entries).encode(), 4)
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "alpha_pattern": patterns}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    begin_s = time.thread_time()
    with pytest.raises(ModelError, match="alpha_pattern take over 1 s"):
        lora.read_lora(tmp_path)
    assert time.thread_time() - begin_s < 2.5


def test_thousands_of_names_in_an_adapter_are_no_patterns(tmp_path: Path) -> None:
    """The first that fits counts, in the order of the file, be it a name or an expression."""
    names = [f"model.layers.{layer}.mlp.{part}_proj" for layer in range(4) for part in ("up", "down")]
    entries = {
        f"base_model.model.{name}.lora_{part}.weight": {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}
        for part in "AB"
        for name in names
    }
    write_header(tmp_path / "adapter_model.safetensors", json.dumps(entries).encode(), 4)
    alphas = {f"layers.{layer}.mlp.other": 9 for layer in range(30_000)}
    alphas |= {"layers.1.mlp.up_proj": 2, r"layers\.[12]\.mlp\.up_proj": 3, "up_proj": 4, r"layers\.3\..*": 5}
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "alpha_pattern": alphas}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    scales = {name: module.scale for name, module in lora.read_lora(tmp_path).modules.items()}
    expected = {"model.layers.0.mlp.up_proj": 4, "model.layers.1.mlp.up_proj": 2, "model.layers.2.mlp.up_proj": 3}
    expected |= {"model.layers.3.mlp.up_proj": 4, "model.layers.3.mlp.down_proj": 5}
    assert scales == {name: expected.get(name, 1) for name in names}


# ---- a tokenizer that makes the library panic

PANICS = {
    "at a pair": {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "B", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {},
    }
}


def tokenizer_file(**changes: object) -> bytes:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}
    return json.dumps({"version": "1.0", "added_tokens": [], "model": model, **changes}).encode()


def test_a_panic_while_loading_is_a_model_error() -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read: "):
        Tokenizer(tokenizer_file(normalizer={"type": "Precompiled", "precompiled_charsmap": "/////2FiYw=="}))


def test_a_panic_at_a_text_is_the_end_of_one_request() -> None:
    tokenizer = Tokenizer(tokenizer_file(post_processor=PANICS["at a pair"]))
    for call in (
        lambda: tokenizer.encode("ab"),
        lambda: tokenizer.encode("ab" * 1000),
        lambda: tokenizer.encode_batch(["ab", "b"]),
        lambda: tokenizer.offsets("ab", [1, 2, 3]),
    ):
        with pytest.raises(RequestError, match="the model's tokenizer fails on this text: "):
            call()


def test_a_text_that_the_vocabulary_lacks_is_a_request_error() -> None:
    model = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "vocab": {"a": 0}}
    tokenizer = Tokenizer(tokenizer_file(model=model | {"max_input_chars_per_word": 100}))
    with pytest.raises(RequestError, match="fails on this text: WordPiece error"):
        tokenizer.encode("猫")
