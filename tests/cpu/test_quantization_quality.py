"""benchmarks/quantization_quality.py measures the loss by quantization: it is small with 8 bits, and larger with 4."""

import json
import subprocess
import sys
from pathlib import Path

from tests.deadlines import scaled

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "quantization_quality.py"
STORY = "Once upon a time there was a patient cat named Zoë. One morning, Zoë invited Sam the mouse for supper. " * 8


def test_schemes_and_a_cache_of_the_demo_model(tmp_path: Path) -> None:
    text, out = tmp_path / "text", tmp_path / "out.json"
    text.write_text(STORY)
    words = ["--text", str(text), "--num-texts", "2", "--length", "48", "--kv-cache-dtype", "int8", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, SCRIPT, "--quantization", "int8", "int4", *words],
        capture_output=True,
        text=True,
        timeout=scaled(120),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["positions"] == 2 * 47
    divergence = {name: row["divergence_nats"] for name, row in found["schemes"].items()}
    assert 0 < divergence["int8"] < divergence["int4"] < 0.2
    assert 0 < divergence["KV cache int8"] < 0.01
