"""Which layers a quantized checkpoint leaves dense, by patterns of their names."""

import re

import pytest

from vllm_lite.checkpoint.quantization.matching import first_fit

NAME = "model.layers.1.mlp.gate_proj"


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
    compile_one = re.compile

    def count(text: str) -> re.Pattern[str]:
        made.append(text)
        return compile_one(text)

    monkeypatch.setattr(re, "compile", count)
    patterns = tuple(f"re:.*{index}$" for index in range(600))
    patterns += tuple(f"model.layers.{index}.mlp" for index in range(20_000))
    assert [first_fit(patterns, f"model.layers.{index}.mlp") for index in (700, 19_999)] == [1300, 20_599]
    assert first_fit(patterns, "599") == 9  # 9 comes before
    assert len(made) == 600
