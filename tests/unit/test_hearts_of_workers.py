"""The hearts of a worker know no feature by name: whatever a feature adds to a step is in its StepPart."""

import ast
import re
from pathlib import Path

import pytest

import vllm_lite

WORKER = Path(vllm_lite.__file__).parent / "worker"
HEARTS = {"model_runner.py": 250, "batch/input_batch.py": 350, "batch/rows.py": 250, "batch/block_tables.py": 200}
"""Files, and the most lines that each may have."""
FEATURES = re.compile(
    r"draft|specul|n-?gram|adapter|lora|mask|grammar|penal|recurrent|row_?states|pooling|pooled|pooler|"
    r"\bscor|prompt_logprobs|expert|step_parts",
    re.IGNORECASE,
)
"""Words of the features that hang on steps."""


def named(text: str) -> list[str]:
    return [f"{number}: {line}" for number, line in enumerate(text.splitlines(), start=1) if FEATURES.search(line)]


@pytest.mark.parametrize("name", HEARTS)
def test_no_heart_names_a_feature_or_grows(name: str) -> None:
    text = (WORKER / name).read_text()
    assert named(text) == [], "a feature hangs on by worker/batch/part.py"
    assert len(text.splitlines()) <= HEARTS[name]


def test_names_are_seen() -> None:
    assert named("self.batch.pooled.kind = 1\nif self.adapters is not None:\nx = 1\nself._draft()") == [
        "1: self.batch.pooled.kind = 1",
        "2: if self.adapters is not None:",
        "4: self._draft()",
    ]


def statements_of(name: str, function: str) -> int:
    """The statements of a function, also those within others, without its docstring."""
    tree = ast.parse((WORKER / name).read_text())
    (found,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == function)
    return sum(isinstance(node, ast.stmt) for node in ast.walk(found)) - 2


def test_a_step_is_read_in_fifteen_statements() -> None:
    assert statements_of("model_runner.py", "execute") <= 15
    assert statements_of("model_runner.py", "check_size") == 2
