"""Command lines written for `vllm serve`: flags without effect are accepted with a message, others are refused."""

import argparse
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from vllm_lite.errors import ConfigError
from vllm_lite.runtime import vllm_settings
from vllm_lite.runtime.settings import add_flags
from vllm_lite.server.config import ServeConfig
from vllm_lite.tools.cli import Parser, serve, vllm_flags, with_dashes

FLAGS_OF_VLLM = Path(__file__).parents[1] / "fixtures" / "vllm_serve_flags.txt"
"""All flags of `vllm serve` of vLLM 0.33, with spaces between them."""


@cache
def parser() -> Parser:
    made = Parser(allow_abbrev=False)
    made.add_argument("folder", nargs="?")
    add_flags(made, ServeConfig)  # a name that is a setting as well would be an error here
    vllm_flags.add_flags(made)
    return made


def parsed(*words: str) -> Any:
    return parser().parse_args(words)


def given(*words: str) -> Any:
    arguments = parsed(*words)
    assert arguments.folder in (None, "MODEL"), "a value was taken for the model"
    return arguments.of_vllm or ()


def test_nothing_is_said_of_our_own_flags() -> None:
    assert vllm_settings.answer(given("MODEL", "--port", "1")) == ""


def test_flags_without_effect_are_listed_once_per_reason() -> None:
    words = [
        "--trust-remote-code",
        "--max-logprobs",
        "20",
        "MODEL",
        "-pp",
        "1",
        "--disable-log-requests",
        "--disable-uvicorn-access-log",
        "-O3",
    ]
    text = vllm_settings.answer(given(*words))
    assert text.startswith("without effect here: --trust-remote-code (no code of a checkpoint is run or needed); ")
    assert "; --disable-log-requests, --disable-uvicorn-access-log (" in text
    assert text.count("(") == text.count(")")


def test_flags_of_its_tests_and_recipes_are_taken() -> None:
    words = "--enable-scale-out --enable-sleep-mode --structured-outputs-config.backend xgrammar MODEL"
    assert "--structured-outputs-config.backend (there is one" in vllm_settings.answer(given(*words.split()))


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--max_model_len", "--max-model-len"),
        ("--max_model_len=a_b", "--max-model-len=a_b"),
        ("--structured_outputs_config.backend", "--structured-outputs-config.backend"),
        ("a_b", "a_b"),
        ("-a_b", "-a_b"),
        ('{"a_b": "--c_d"}', '{"a_b": "--c_d"}'),
    ],
)
def test_names_may_have_underscores(word: str, meant: str) -> None:
    assert with_dashes(word) == meant


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("-pp 2", r"^-pp can only be 1 here: layers are not shared out; use -tp; got '2'$"),
        ("--data-parallel-rank 1", r"^--data-parallel-rank of vLLM is not supported: the engines of -dp"),
        ("--hf-config-path x", r"^--hf-config-path of vLLM is not supported: give a folder"),
        ("--trust-remote-code --middleware a.b", r"^--middleware of vLLM is not supported"),
        ("--return-sampling-mask", r"answers tell no masks"),
    ],
)
def test_unsupported_values_of_vllms_flags_are_refused_with_the_reason(words: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        vllm_settings.answer(given(*words.split(), "MODEL"))


def test_a_switch_that_is_switched_off_asks_for_nothing() -> None:
    assert vllm_settings.answer(given("--no-return-sampling-mask")).startswith("without effect here: --no-return")


def test_every_flag_has_an_answer() -> None:
    """Each name is in one table only: argparse refuses a second one."""
    for table, is_refused in ((vllm_settings.WITHOUT_EFFECT, False), (vllm_settings.REFUSED, True)):
        for row in table:
            for name in row.names.split():
                value = [row.values[0] if row.values else "x"] if row.values != () else []
                if is_refused:
                    with pytest.raises(ConfigError, match=f"^{name} "):
                        vllm_settings.answer(given(name, *value))
                else:
                    assert name in vllm_settings.answer(given(name, *value))


def test_no_flag_of_vllm_is_unknown() -> None:
    parser = argparse.ArgumentParser()
    serve.add_flags(parser)
    known = parser._option_string_actions
    assert [flag for flag in FLAGS_OF_VLLM.read_text().split() if flag not in known] == []


def test_a_refused_flag_may_have_several_values() -> None:
    with pytest.raises(ConfigError, match=r"^--cpu-offload-params of vLLM is not supported: weights stay"):
        vllm_settings.answer(given("--cpu-offload-params", "gate", "up"))


@pytest.mark.parametrize(
    ("words", "setting", "value"),
    [
        (
            ("--speculative-config.method", "ngram", "--speculative-config.num-speculative-tokens=4"),
            "speculative_config",
            '{"method": "ngram", "num_speculative_tokens": 4}',
        ),
        (
            ("-sc.method", "ngram", "-sc", '{"prompt_lookup_max": 2, "method": "x"}'),
            "speculative_config",
            '{"prompt_lookup_max": 2, "method": "ngram"}',
        ),
        (("--hf-overrides.a.b", "null", "--hf-overrides.a.c", "[1"), "hf_overrides", '{"a": {"b": null, "c": "[1"}}'),
        (("--pooler-config.task",), "pooler_config", '{"task": ""}'),
    ],
)
def test_keys_of_a_json_setting_may_be_flags(words: tuple[str, ...], setting: str, value: str) -> None:
    assert getattr(parsed("MODEL", *words), setting) == value


def test_a_key_that_is_too_deep_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("-sc.a.b.c.d.e.f.g.h.i", "1")
    assert "-sc.a.b.c.d.e.f.g.h.i is 9 keys deep; settings have at most 8" in capsys.readouterr().err


def test_keys_of_a_config_of_vllm_are_answered_as_the_config() -> None:
    assert "-cc (nothing is compiled" in vllm_settings.answer(given("MODEL", "-cc.mode=none", "-cc.x.y", "1"))
    with pytest.raises(ConfigError, match=r"^--kv-transfer-config of vLLM is not"):
        vllm_settings.answer(given("--kv-transfer-config.kv_role", "kv_both", "MODEL"))


def test_help_does_not_show_them(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    vllm_flags.add_flags(parser)
    parser.print_help()
    assert "--trust-remote-code" not in capsys.readouterr().out
