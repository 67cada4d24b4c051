"""`vllm-lite quantize`: compressed-tensors, transformers and this package read its files."""

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint
from tests.families.all import VARIANTS
from tests.paged import Oracle
from vllm_lite.checkpoint.tensors.headers import SINGLE_FILE
from vllm_lite.errors import ConfigError, ModelError
from vllm_lite.kernels.grouped import dequantize, quantize4
from vllm_lite.tools.cli import main
from vllm_lite.tools.quantize import checkpoint as written
from vllm_lite.tools.quantize.checkpoint import quantize_checkpoint
from vllm_lite.tools.quantize.schemes import SCHEMES, Scheme

SIZES: Any = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 4}


def by_library(stored: dict[str, torch.Tensor], scheme: Scheme) -> torch.Tensor:
    """Quantize a matrix by compressed-tensors."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(**{key: value for key, value in scheme.weights.items() if value is not None})
    own = QuantizationScheme(targets=["Linear"], weights=args, format=scheme.form)
    made: torch.Tensor = BaseCompressor.get_value_from_registry(scheme.form).decompress(dict(stored), own)["weight"]
    return made.float()


@pytest.mark.usefixtures("float_products")
@pytest.mark.parametrize("name", SCHEMES)
def test_a_written_checkpoint_is_read_alike_by_transformers(tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    source, out = make_checkpoint(tmp_path / "dense", **SIZES), tmp_path / "out"
    made = quantize_checkpoint(source, out, name)
    assert not made.kept
    dense, stored = load_file(source / SINGLE_FILE), load_file(out / SINGLE_FILE)
    layer = "model.layers.0.mlp.down_proj"
    own = {key.removeprefix(f"{layer}."): value for key, value in stored.items() if key.startswith(f"{layer}.")}
    library, weight = by_library(own, SCHEMES[name]), dense[f"{layer}.weight"]
    if name.startswith("int4"):
        integers = dequantize(quantize4(weight, SCHEMES[name].group_size or 0)).bfloat16().float()
        assert (library != integers).float().mean() < 0.01  # of two scales as good, either may be taken
    assert (library - weight).abs().max() < 0.2 * weight.abs().max()
    for each, tensor in dense.items():
        assert each.endswith("_proj.weight") or torch.equal(stored[each], tensor)
    oracle = Oracle(source)
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.inference_mode():
        wanted = theirs(oracle.tokens[None]).logits[0]
    found = oracle.logits_of(out)
    if name.startswith("int4"):  # of the others transformers quantizes the inputs of products, too
        torch.testing.assert_close(found, wanted, rtol=0, atol=3e-3)
    for logits in oracle.logits_on_two_ranks(out):
        torch.testing.assert_close(logits, found, rtol=0, atol=1e-3)


def test_inputs_that_are_no_whole_groups_stay_dense(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_checkpoint(tmp_path / "dense", **{**SIZES, "intermediate_size": 96})
    assert main(["quantize", str(source), "--out", str(tmp_path / "again")]) == 0
    assert "kept as they are: model.layers.0.mlp.down_proj.weight, model" in capsys.readouterr().out
    made = quantize_checkpoint(source, tmp_path / "out", "int4")
    assert made.kept == [f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(2)]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    dense = [f"model.layers.{layer}.mlp.down_proj" for layer in range(2)]
    assert config["quantization_config"]["ignore"] == ["lm_head", *dense]
    Oracle(source).stored_as(tmp_path / "out")


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_rows_of_eight_bits_use_their_whole_range(name: str) -> None:
    """Includes rows of zeros, and rows so small that their scale is rounded."""
    rows = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    rows[1], rows[2], rows[3] = 0, rows[2] * 1e-42, rows[3] * 1e37
    made = SCHEMES[name].make(rows)
    codes, scales = made["weight"].float(), made["weight_scale"]
    largest = {"int8": 127, "fp8": 448}[name]
    assert scales.shape == (6, 1)
    assert codes.isfinite().all()
    assert (codes[[0, 3, 4, 5]].abs().amax(1) == largest).all()
    assert not codes[1].any()
    rest = ((codes * scales - rows).abs() / rows.abs().amax(1, keepdim=True))[[0, 3, 4, 5]]
    assert (rest < {"int8": 0.501 / 127, "fp8": 1 / 28}[name]).all()  # the last 3 bits of 1.75 * 256 are 32
    assert SCHEMES[name].config([])["config_groups"]["group_0"]["input_activations"] == {
        **SCHEMES[name].weights,
        "strategy": "token",
        "dynamic": True,
    }


def logits_of(path: Path, tokens: torch.Tensor) -> torch.Tensor:
    """By transformers."""
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        made: torch.Tensor = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(tokens[None]).logits[0]
    return made


@pytest.mark.usefixtures("float_products")
@pytest.mark.parametrize("name", ["qwen2-odd-tied", "neox"])
def test_heads_stay_as_they_are_for_others(tmp_path: Path, name: str) -> None:
    """Some of transformers' models have a head that no file has, or another name for it."""
    source = next(one for one in VARIANTS if one.name == name).make(tmp_path / "dense")
    quantize_checkpoint(source, tmp_path / "out", "int4_g32")
    oracle = Oracle(source)
    found = oracle.logits_of(tmp_path / "out")
    torch.testing.assert_close(found, logits_of(tmp_path / "out", oracle.tokens), rtol=0, atol=3e-3)


@pytest.mark.parametrize(("name", "num_quantized"), [("granite-moe-shared", 12), ("deepseek-v3", 57)])
def test_experts_in_one_tensor_and_latents_of_any_size(tmp_path: Path, name: str, num_quantized: int) -> None:
    source = next(one for one in VARIANTS if one.name == name).make(tmp_path / "dense")
    made = quantize_checkpoint(source, tmp_path / "out", "int8")
    assert (made.num_quantized, made.kept) == (num_quantized, [])
    Oracle(source).stored_as(tmp_path / "out")


def test_a_link_is_followed_and_an_empty_folder_filled(tmp_path: Path) -> None:
    source, out = make_checkpoint(tmp_path / "dense", **SIZES), tmp_path / "out"
    out.mkdir()
    (tmp_path / "link").symlink_to("out")
    assert quantize_checkpoint(source, tmp_path / "link", "int8").folder == tmp_path / "link"
    assert (tmp_path / "link").is_symlink()
    assert (out / "config.json").exists()


def test_files_are_bounded_and_the_rest_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_checkpoint(tmp_path / "dense", **SIZES)
    (source / "tokenizer.json").write_text("{}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    monkeypatch.setattr(written, "SHARD_BYTES", 1 << 17)
    seen: list[tuple[int, int]] = []
    made = quantize_checkpoint(source, tmp_path / "out", "int4_g32", lambda *now: seen.append(now))
    files = sorted(tmp_path.glob("out/*.safetensors"))
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert sum(tensor.nbytes for file in files for tensor in load_file(file).values()) == made.num_bytes
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert (tmp_path / "out" / "additional_chat_templates" / "tools.jinja").read_text() == "{{ tools }}"
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755
    assert seen == sorted(seen)
    assert seen[0][0] < seen[-1][0] / 2
    assert len({total for _, total in seen}) == 1
    Oracle(source).stored_as(tmp_path / "out")


def test_an_index_is_not_copied(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "dense", max_shard_size="100KB", **SIZES)
    assert len(list(source.glob("*.safetensors"))) > 2
    quantize_checkpoint(source, tmp_path / "out", "int8")
    assert [file.name for file in tmp_path.glob("out/model*")] == [SINGLE_FILE]


def test_room_is_asked_for_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_checkpoint(tmp_path / "dense", **SIZES)
    size = (source / SINGLE_FILE).stat().st_size
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=size // 2))
    with pytest.raises(ConfigError, match=r"has 0 MiB free, and about 1 MiB are needed"):
        quantize_checkpoint(source, tmp_path / "out", "int8")
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_a_failure_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_checkpoint(tmp_path / "dense", **SIZES)

    def fail(_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(SCHEMES, "int8", SCHEMES["int8"]._replace(make=fail))
    with pytest.raises(ConfigError, match=r"out: cannot be written \(No space left on device\)"):
        quantize_checkpoint(source, tmp_path / "out", "int8")
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """safetensors raises its own error type for this."""
    source = make_checkpoint(tmp_path / "dense", **SIZES)

    def fail(*_: Any, **__: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(written, "save_file", fail)
    with pytest.raises(ConfigError, match=r"out: cannot be written \(I/O error: No space left on device"):
        quantize_checkpoint(source, tmp_path / "out", "int8")
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    source = make_checkpoint(tmp_path / "dense", **SIZES)
    before = signal.getsignal(number)

    def killed(_: torch.Tensor) -> dict[str, torch.Tensor]:
        signal.pthread_kill(threading.main_thread().ident or 0, number)
        return {}

    monkeypatch.setitem(SCHEMES, "int8", SCHEMES["int8"]._replace(make=killed))
    with pytest.raises(SystemExit) as ended:
        main(["quantize", str(source), "--scheme", "int8", "--out", str(tmp_path / "out")])
    assert ended.value.code == 128 + number
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]
    assert signal.getsignal(number) == before


DOWN = "model.layers.1.mlp.down_proj.weight"


def without(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[DOWN]


def with_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors[DOWN][3, 5] = torch.nan


def with_infinity(tensors: dict[str, torch.Tensor]) -> None:
    tensors[DOWN][3, 5] = torch.inf


def of_doubles(tensors: dict[str, torch.Tensor]) -> None:
    tensors[DOWN] = tensors[DOWN].double()


Damage = Callable[[dict[str, torch.Tensor]], None]
DAMAGE: dict[Damage, str] = {
    without: r"1 missing: model.layers.1.mlp.down_proj.weight",
    with_nan: r"down_proj.weight' has values that are infinite or no numbers; it cannot be quantized",
    with_infinity: r"down_proj.weight' has values that are infinite or no numbers",
    of_doubles: r"1 not stored as one of F32, BF16, F16: model.layers.1.mlp.down_proj.weight F64",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda one: one.__name__)
def test_damaged_weights_are_not_written(tmp_path: Path, damage: Damage) -> None:
    source = make_checkpoint(tmp_path / "dense", **SIZES)
    tensors = load_file(source / SINGLE_FILE)
    damage(tensors)
    save_file(tensors, source / SINGLE_FILE)
    with pytest.raises(ModelError, match=DAMAGE[damage]):
        quantize_checkpoint(source, tmp_path / "out", "int4")
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_checkpoints_that_cannot_be_quantized_are_refused(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "dense", hidden_size=64, intermediate_size=96)
    with pytest.raises(ConfigError, match=r"dense: has no matrix whose inputs are whole groups of int4; try --scheme"):
        quantize_checkpoint(source, tmp_path / "out", "int4")
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.json").symlink_to("nothing")
    with pytest.raises(ConfigError, match=r"dense/tokenizer.json: cannot be copied \(No such file or directory\)"):
        quantize_checkpoint(source, tmp_path / "out", "int8")
    (source / SINGLE_FILE).unlink()
    os.mkfifo(source / SINGLE_FILE)
    with pytest.raises(ModelError, match=r"model.safetensors: is not a file"):
        quantize_checkpoint(source, tmp_path / "out", "int8")
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_the_bundled_model_has_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", "demo", "--scheme", "int8", "--out", str(tmp_path / "out")]) == 0
    assert "matrices as int8" in capsys.readouterr().out


def test_impossible_requests_are_refused_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = make_checkpoint(tmp_path / "dense", **SIZES), tmp_path / "out"
    assert main(["quantize", str(source), "--scheme", "int4", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"Try: vllm-lite serve {out}" in said
    assert "kept as they are" not in said
    assert main(["quantize", str(source), "--out", str(out)]) == 2
    assert capsys.readouterr().err == f"vllm-lite: {out}: is there already; give a folder that is new or empty\n"
    with pytest.raises(ModelError, match=r"is quantized already \(compressed-tensors w4a16\); a dense checkpoint"):
        quantize_checkpoint(out, tmp_path / "again", "int8")
    with pytest.raises(ConfigError, match=r"scheme 'int3' is not supported; supported: int4, int4_g32, int8, fp8"):
        quantize_checkpoint(source, tmp_path / "again", "int3")
    assert not (tmp_path / "again").exists()
