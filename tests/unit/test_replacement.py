"""Checkpoints that may take the place of another one, by their headers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import vllm_lite
from vllm_lite.checkpoint.replacement import check_same_model, read_weights
from vllm_lite.errors import ModelError

DEMO = Path(vllm_lite.__file__).parent / "demo_model"
SERVED = read_weights(str(DEMO), "auto", has_files=True)


def config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def tensors(name: str, num_rows: int | None) -> Callable[[Path], None]:
    """Rename a tensor in the header of its file, or leave it so many elements of two bytes."""

    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:end])
        if num_rows is None:
            header["other"] = header.pop(name)
        else:
            begin = header[name]["data_offsets"][0]
            header[name] |= {"shape": [num_rows], "data_offsets": [begin, begin + 2 * num_rows]}
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])

    return change


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (config(vocab_size=7), "it differs in its vocab_size, 7, not "),
        (config(num_hidden_layers=1), "it differs in its layers, of which there are 1, not "),
        (config(architectures=["MistralForCausalLM"], model_type="mistral"), "architecture, 'MistralForCausalLM', not"),
        (config(rope_theta=5.0, rope_parameters=None), "it differs in its layers, rope "),
        (tensors(NORM, 3), f"its tensor {NORM} has the shape [3], not ["),
        (tensors(NORM, None), f"it lacks the tensor {NORM} of the model"),
    ],
)
def test_another_model_is_named_by_its_first_difference(
    change: Callable[[Path], None], sentence: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(DEMO, tmp_path / "other")
    check_same_model(str(folder), read_weights(str(folder), "auto", has_files=True), SERVED)
    change(folder)
    with pytest.raises(ModelError) as caught:
        check_same_model(str(folder), read_weights(str(folder), "auto", has_files=True), SERVED)
    assert sentence in str(caught.value)
    assert str(caught.value).startswith(f"{folder}: ")
    assert len(str(caught.value)) < 400
