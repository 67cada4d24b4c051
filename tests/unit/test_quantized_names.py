"""Layers that a quantized checkpoint leaves dense, by patterns of their names."""

import time
from contextlib import nullcontext

import pytest
import regex

from vllm_lite.checkpoint.quantization import matching
from vllm_lite.checkpoint.quantization.matching import MAX_EXPRESSIONS, first_fit
from vllm_lite.errors import ModelError

NAME = "model.layers.1.mlp.gate_proj"
ALTERNATIONS = r"(?:.|\S)" * 30


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ((), None),
        ((NAME,), 0),
        (("lm_head", "model.layers.1"), 1),
        (("model.layers.11", "model.layer", "gate", "mlp", "e_proj"), None),
        (("gate_proj", "lm_head", "gate_proj"), 0),
        (("mlp.gate_proj", NAME), 0),
        (("model.language_model.layers.1.mlp",), 0),
        (("re:.*mlp", NAME), 0),
        ((NAME, "re:.*mlp"), 0),
        (("re:mlp", "part:1.ml"), 1),
        (("part:2.ml", "re:.*gate", "mlp.gate_proj"), 1),
    ],
)
def test_the_first_pattern_that_fits(patterns: tuple[str, ...], expected: int | None) -> None:
    assert first_fit(patterns, NAME) == expected


def test_thousands_of_patterns_are_made_ready_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    compile_one = regex.compile

    def count(text: str) -> regex.Pattern[str]:
        made.append(text)
        return compile_one(text)

    monkeypatch.setattr(regex, "compile", count)
    patterns = tuple(f"re:.*{index}$" for index in range(600))
    patterns += tuple(f"model.layers.{index}.mlp" for index in range(20_000))
    assert [first_fit(patterns, f"model.layers.{index}.mlp") for index in (700, 19_999)] == [1300, 20_599]
    assert first_fit(patterns, "599") == 9  # the pattern for 9 is the first that matches
    assert len(made) == 600


@pytest.mark.parametrize(
    ("patterns", "is_refused"),
    [
        (tuple(f"re:{ALTERNATIONS}Z{index}" for index in range(2)), False),  # the library looks for the Z first
        (tuple(rf"re:(.+?)+?\1\1[!{index}]" for index in range(2)), True),
        (tuple(f"re:.*x{index}" for index in range(MAX_EXPRESSIONS + 1)), True),
    ],
    ids=["alternations", "repeated groups", "too many"],
)
def test_expressions_take_a_second_at_the_most(patterns: tuple[str, ...], is_refused: bool) -> None:
    """All of them together, for all names, on the processor; they are a stranger's."""
    names = [f"model.layers.0.self_attn.{'a' * 60}{index}" for index in range(1000)]
    begin_s = time.thread_time()
    with pytest.raises(ModelError, match="for the names of layers") if is_refused else nullcontext():
        any(first_fit(patterns, name) for name in names)
    assert time.thread_time() - begin_s < 2.5


def test_names_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name alone would take less than all of the time."""
    monkeypatch.setattr(matching, "MATCHING_S", 0.2)
    patterns = (r"re:(.+?)+?\1\1[!?]",)
    with pytest.raises(ModelError, match=r"take over 0\.2 s"):
        any(first_fit(patterns, f"{'a' * 12}{index}") for index in range(100_000))
