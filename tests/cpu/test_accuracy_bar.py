"""Accuracy of every way to store and multiply weights, on a small model in which a few channels are far larger than
others: none may become less exact. tests/real/test_accuracy.py does the same with real models, if they are in the
cache."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.isas import isa_in_use
from vllm_lite.checkpoint.quantization.mixed import MixedForm
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.config import demo_folder
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.weights.linear import multiplies_bytes

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from accuracy import WAYS, Figures, Way, ours  # noqa: E402 - found only once benchmarks/ is on the path
from accuracy_peers import Scores  # noqa: E402

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no native library")

STORY = """\
Once upon a time there was a sleepy bear named Zoë. Zoë had never seen the highest mountain. So Thursday came, and Zoë
set out with a woollen blanket and some blueberry muffins. The road was long, and Zoë felt tired. She rested in a
small café and followed a narrow path. In the garden she met Hugo, a cheerful sheep. “Where are you going?” asked
Hugo. “I have always wanted to see the highest mountain too,” said Hugo. So they walked through a dark wood together.
At noon they shared some cheese toast in the garden. And there, at last, they saw the highest mountain."""
LARGE_CHANNELS = (7, 90, 91, 200)
FACTOR = 24.0
"""Factor by which these channels are larger after norms than in the demo model; products divide their columns by it."""
MEASURED = {
    "float32": 0.0,
    "bfloat16": 0.01542,
    "bfloat16, KV int8": 0.01979,
    "int8": 0.04145,
    "int8, exact": 0.03724,
    "int8, float32": 0.03286,
    "fp8": 0.09139,
    "fp8, exact": 0.09139,
    "fp8, float32": 0.08944,
    "int4_g32": 0.47607,
    "int4_g32, exact": 0.46729,
    "int4_g32, float32": 0.46771,
    "int4_g32, in 5 bits": 0.39055,
    "int4_g32, in 5 bits, float32": 0.37404,
    "int4": 0.70277,
    "int4, exact": 0.6774,
    "int4, float32": 0.67433,
}
"""Mean difference of the log-probabilities of the ten likeliest tokens, in nats. The instruction sets that multiply
bytes by vectors are within 5 % of each other; tiles have larger groups, and the baseline does not round inputs."""


def enlarge(weights: dict[str, torch.Tensor]) -> None:
    """Let some channels be far larger, as they are in real models; the exact model stays the same function."""
    channels = list(LARGE_CHANNELS)
    readers = {"input_layernorm": ("q_proj", "k_proj", "v_proj"), "post_attention_layernorm": ("gate_proj", "up_proj")}
    for name, weight in weights.items():
        layer, _, end = name.removesuffix(".weight").rpartition(".")
        if end in readers:
            weight[channels] *= FACTOR
            for reader, other in weights.items():
                if reader.startswith(f"{layer}.") and reader.removesuffix(".weight").endswith(readers[end]):
                    other[:, channels] /= FACTOR


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = Path(demo_folder())
    folder = tmp_path_factory.mktemp("large") / "model"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    weights = {name: weight.float() for name, weight in load_file(source / "model.safetensors").items()}
    enlarge(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return folder


@pytest.fixture(scope="module")
def texts(model: Path) -> list[list[int]]:
    return [Tokenizer.load(model).encode(STORY)]


@pytest.fixture(scope="module")
def exact(model: Path, texts: list[list[int]]) -> Scores:
    with isa_in_use("baseline"), torch.inference_mode():
        return ours(model, texts, Way(torch.float32))


@pytest.mark.parametrize("way", WAYS["dense"])
def test_no_way_is_less_exact_than_it_was(model: Path, texts: list[list[int]], exact: Scores, way: str) -> None:
    if not multiplies_bytes() or cpu.isa().startswith("amx"):
        pytest.skip(f"the figures are of products of bytes by vectors, and this machine has {cpu.isa()}")
    with torch.inference_mode():
        found = Figures.of(exact, ours(model, texts, WAYS["dense"][way]), texts)
    assert found.top <= 1.1 * MEASURED[way] + 2e-5, found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nor_are_the_5_bits_of_rows_that_are_no_whole_blocks(
    model: Path, texts: list[list[int]], exact: Scores, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not multiplies_bytes() or cpu.isa().startswith("amx"):
        pytest.skip(f"the figures are of products of bytes by vectors, and this machine has {cpu.isa()}")
    monkeypatch.setattr(MixedForm, "of", lambda spec, *_: MixedForm(spec.num_layers, gives_more=True))
    with torch.inference_mode():
        found = Figures.of(exact, ours(model, texts, Way(dtype, "int4_g32")), texts)
    way = "int4_g32, in 5 bits" + (", float32" if dtype == torch.float32 else "")
    assert found.top <= 1.1 * MEASURED[way] + 2e-5, found
