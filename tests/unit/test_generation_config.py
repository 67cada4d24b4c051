"""Sampling defaults: the checkpoint's file, another file, the user's values over both, and those that become limits."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from tests import tokenizers_for_tests as made
from tests.fakes import welcome
from vllm_lite.client.generation_config import (
    FILE,
    GenerationDefaults,
    GenerationOverrides,
    generation_defaults,
    read_overrides,
)
from vllm_lite.client.streams.stream import StreamFactory
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.errors import ConfigError, ModelError, RequestError
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.server.config import ServeConfig

OWN = {
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": None,
    "repetition_penalty": 1.1,
    "max_new_tokens": 50,
    "eos_token_id": [1, 2],
    "transformers_version": "5.0.0",
}
PARAMS = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1, "max_tokens": 50}


def folder_with(path: Path, entries: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    (path / FILE).write_text(json.dumps(entries))
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return folder_with(tmp_path / "model", OWN)


def test_the_checkpoints_own(model: Path, tmp_path: Path) -> None:
    found = generation_defaults(model)
    assert found == GenerationDefaults(PARAMS, None, str(model / FILE))
    assert str(found).startswith("repetition_penalty 1.1, temperature 0.6, top_k 20, top_p 0.95, max_tokens 50 (")
    assert generation_defaults(tmp_path) == GenerationDefaults({}, None, "vllm")
    assert generation_defaults(model, "vllm") == GenerationDefaults({}, None, "vllm")


def test_another_folders_file_is_a_limit(model: Path, tmp_path: Path) -> None:
    other = folder_with(tmp_path / "other", {"temperature": 0.1, "max_new_tokens": 9})
    for source in (other, other / FILE):
        found = generation_defaults(model, str(source))
        assert (found.params, found.max_tokens) == ({"temperature": 0.1, "max_tokens": 9}, 9)
    assert "no request gets more than 9 tokens" in str(found)


def test_the_users_settings_override_the_file(model: Path) -> None:
    found = generation_defaults(model, overrides=GenerationOverrides(temperature=0.0, top_k=None, min_p=0.1))
    assert found.params == {
        **{name: PARAMS[name] for name in PARAMS if name != "top_k"},
        "temperature": 0,
        "min_p": 0.1,
    }
    assert found.max_tokens is None
    assert found.because == f"{model / FILE} and override_generation_config"
    found = generation_defaults(model, "vllm", GenerationOverrides(max_new_tokens=5))
    assert found == GenerationDefaults({"max_tokens": 5}, 5, "override_generation_config")


@pytest.mark.parametrize("text", ["{", "[]", '{"temperature": -1}', '{"top_k": "x"}', '{"max_new_tokens": 0}', "\xff"])
def test_a_damaged_file_is_named(model: Path, text: str) -> None:
    (model / FILE).write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"generation_config\.json: .*; correct it, or ignore it with generation_con"):
        generation_defaults(model)
    assert not generation_defaults(model, "vllm").params


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"temperature": -1}, "temperature must be between 0.0 and 100.0, got -1"),
        ({"top_p": 0}, "top_p must be greater than 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be between 1"),
        ({"temprature": 1}, "unknown field `temprature`"),
        ({"top_k": "many"}, "top_k"),
        ([1], "must be a "),
    ],
)
def test_wrong_overrides_are_refused_in_one_sentence(given: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_overrides(given)
    for written in (given, json.dumps(given)):
        with pytest.raises(ConfigError, match=f"override_generation_config.*({says}|must be a whole number)"):
            ServeConfig.check({"override_generation_config": written})


def test_overrides_from_flag_environment_and_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("override_generation_config: {top_k: 5}\n")
    assert ServeConfig.load({}, {}, file).override_generation_config == GenerationOverrides(top_k=5)
    env = {"VLLM_LITE_OVERRIDE_GENERATION_CONFIG": '{"top_p": 0.5}'}
    assert ServeConfig.load({}, env, file).override_generation_config == GenerationOverrides(top_p=0.5)
    config = ServeConfig.load({"override_generation_config": '{"min_p": 0.5, "top_k": null}'}, env, file)
    assert config.override_generation_config == GenerationOverrides(min_p=0.5, top_k=None)
    file.write_text(config.to_yaml())
    assert ServeConfig.load({}, {}, file).override_generation_config == config.override_generation_config


def test_do_sample_false_is_said_not_to_be_followed(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder_with(model, {"do_sample": False, "top_p": 0.9})
    with caplog.at_level("INFO", logger="vllm_lite"):
        assert generation_defaults(model).params == {"top_p": 0.9}
        assert "sampling defaults: top_p 0.9" in caplog.text
        assert "do_sample false, which is not followed" in caplog.text
        caplog.clear()
        generation_defaults(model, overrides=GenerationOverrides(temperature=0.0))
        assert "says do_sample" not in caplog.text
        caplog.clear()
        folder_with(model, {"do_sample": False})
        assert generation_defaults(model).params == {}
        assert "says do_sample" in caplog.text


def test_a_limit_holds_for_every_request() -> None:
    tokenizer = Tokenizer(made.byte_level())
    limits = welcome(vocab_size=tokenizer.vocab_size)
    factory = StreamFactory(limits, tokenizer, most_tokens=5)
    for asked, got in ((None, 5), (100, 5), (3, 3)):
        stream = factory.make("a", SamplingParams(max_tokens=asked), "1")
        assert stream.params.max_tokens == got
        assert factory.fork(stream, SamplingParams(max_tokens=asked), "2").params.max_tokens == got
    assert StreamFactory(limits, tokenizer).make("a", SamplingParams(max_tokens=100), "1").params.max_tokens == 100
    with pytest.raises(RequestError, match=r"min_tokens must be at most max_tokens \(5\), got 7, which this server's"):
        factory.make("a", SamplingParams(max_tokens=100, min_tokens=7), "1")


def gguf_with(path: Path, **values: float) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in values.items():
        add: Any = writer.add_int32 if isinstance(value, int) else writer.add_float32
        add(f"general.sampling.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_defaults_of_a_gguf_file(tmp_path: Path) -> None:
    file = gguf_with(
        tmp_path / "m.gguf",
        temp=0.7,
        top_k=20,
        top_p=0.95,
        min_p=0.0,
        penalty_repeat=1.05,
        mirostat=0,
        xtc_threshold=0.1,
    )
    wanted = {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.05}
    assert generation_defaults(file) == GenerationDefaults(wanted, None, str(file))
    assert generation_defaults(tmp_path).params == wanted, "the folder of the file"
    assert generation_defaults(file, overrides=GenerationOverrides(top_k=None)).params.keys() == wanted.keys() - {
        "top_k"
    }
    assert not generation_defaults(file, "vllm").params
    folder_with(tmp_path, {"temperature": 0.1})
    assert generation_defaults(tmp_path).params == {"temperature": 0.1}, "a file beside it wins"


def test_a_gguf_file_without_or_with_invalid_defaults(tmp_path: Path) -> None:
    assert generation_defaults(gguf_with(tmp_path / "none.gguf")) == GenerationDefaults({}, None, "vllm")
    with pytest.raises(ModelError, match=r"odd\.gguf: .*temperature.*correct it, or ignore it"):
        generation_defaults(gguf_with(tmp_path / "odd.gguf", temp=-3.0))
