"""Loading is strict both ways, reads nothing but safetensors inside the folder, and says all that is wrong at once."""

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import load_and_see, make_checkpoint
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.tensors.headers import INDEX_FILE, SINGLE_FILE, weight_files
from vllm_lite.errors import ConfigError, ModelError
from vllm_lite.models.registry import Sizes, build
from vllm_lite.models.weights import load_weights


def make_model(path, dtype="float32"):
    return build(load_spec(path), dtype, "cpu", Sizes(64, 8))


def load(path, dtype="float32", **options):
    """Every weight by its checkpoint name, as it was loaded."""
    return load_and_see(make_model(path, dtype), path, **options)


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("weights")
    return {
        "whole": make_checkpoint(root / "whole", attention_bias=True),
        "tied": make_checkpoint(root / "tied", tie_word_embeddings=True),
        "sharded": make_checkpoint(root / "sharded", max_shard_size="100KB"),
        "bfloat16": make_checkpoint(root / "bfloat16", dtype="bfloat16"),
    }


@pytest.fixture
def copy(originals, tmp_path):
    """A fresh copy of a checkpoint to damage."""
    return lambda name="whole": Path(shutil.copytree(originals[name], tmp_path / name))


def rewrite(path, change):
    """Apply `change` to the tensors of a single-file checkpoint."""
    tensors = load_file(path / SINGLE_FILE)
    change(tensors)
    save_file(tensors, path / SINGLE_FILE)


def refusal(path):
    with pytest.raises(ModelError) as caught:
        load(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["whole", "sharded", "tied", "bfloat16"])
def test_every_tensor_arrives_by_value(originals, name):
    path = originals[name]
    files = list(path.glob("*.safetensors"))
    assert (len(files) > 2) == (name == "sharded")
    stored = {key: tensor for file in files for key, tensor in load_file(file).items()}
    loaded = load(path)
    assert loaded.keys() == stored.keys()
    for key, tensor in stored.items():
        assert torch.equal(loaded[key], tensor.float()), key


def test_fused_weights_hold_their_parts_in_order(originals):
    model = make_model(originals["whole"])
    load_weights(model, originals["whole"])
    stored = load_file(originals["whole"] / SINGLE_FILE)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    for index, layer in enumerate(model.layers):
        attention, mlp = f"model.layers.{index}.self_attn.", f"model.layers.{index}.mlp."
        for linear, prefix, parts in (
            (layer.attention.qkv, attention, "qkv"),
            (layer.mlp.gate_up, mlp, ("gate", "up")),
        ):
            weight = torch.cat([stored[f"{prefix}{part}_proj.weight"] for part in parts])
            out, expected = torch.empty(3, len(weight)), x @ weight.t()
            if linear.bias:
                expected += torch.cat([stored[f"{prefix}{part}_proj.bias"] for part in parts])
            linear.forward(x, out)
            assert torch.allclose(out, expected, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_is_converted_on_the_way(originals, dtype):
    stored = load_file(originals["bfloat16"] / SINGLE_FILE)
    loaded = load(originals["bfloat16"], dtype)
    assert all(torch.equal(loaded[name], stored[name].to(getattr(torch, dtype))) for name in stored)


def test_missing_and_unexpected_tensors_are_listed_together(copy):
    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["lm_head.scale"] = torch.ones(1)

    path = copy()
    rewrite(path, change)
    message = refusal(path)
    assert "1 missing: model.norm.weight" in message
    assert "1 unexpected: lm_head.scale" in message


def test_names_that_are_no_text_are_quoted(copy):
    """A terminal would execute their escape sequences."""

    def change(tensors):
        tensors["a\n\x1b[31mb.weight"] = torch.ones(1)

    path = copy()
    rewrite(path, change)
    assert r"1 unexpected: 'a\n\x1b[31mb.weight'" in refusal(path)


def test_long_lists_are_cut_and_counted(copy):
    path = copy()
    rewrite(path, lambda tensors: [tensors.pop(name) for name in sorted(tensors)[:14]])
    message = refusal(path)
    assert "14 missing: " in message
    assert message.endswith(" and 4 more")
    assert message.count("layers.") <= 10


def test_a_wrong_shape_is_shown_with_the_right_one(copy):
    path = copy()
    rewrite(path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}))
    assert "model.norm.weight (63,), not (64,)" in refusal(path)


def test_a_dtype_that_cannot_be_read_is_named(copy):
    path = copy()
    rewrite(path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    assert "1 not stored as one of F32, BF16, F16: model.norm.weight I8" in refusal(path)


def test_tied_head_may_be_there_and_old_rope_tables_too(copy):
    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    path = copy("tied")
    rewrite(path, change)
    model = make_model(path)
    assert "lm_head.weight" not in {slot.name for group in model.weight_groups() for slot in group.slots}
    load_weights(model, path)
    assert model.logits(torch.ones(1, 64)).isfinite().all()


def test_an_untied_head_must_be_there(copy):
    path = copy()
    rewrite(path, lambda tensors: tensors.pop("lm_head.weight"))
    assert "1 missing: lm_head.weight" in refusal(path)


def test_truncated_file_is_named_with_its_tensor(copy):
    path = copy()
    data = (path / SINGLE_FILE).read_bytes()
    (path / SINGLE_FILE).write_bytes(data[:-100])
    message = refusal(path)
    assert SINGLE_FILE in message
    assert "tensor 'model.norm.weight' ends at byte" in message


@pytest.mark.parametrize(
    "data", [b"", b"short", b"\xff" * 64, (2).to_bytes(8, "little") + b"[]", (40).to_bytes(8, "little") + b"{" * 40]
)
def test_a_corrupt_file_is_named(copy, data):
    path = copy()
    (path / SINGLE_FILE).write_bytes(data)
    assert f"{SINGLE_FILE}: not a valid safetensors file" in refusal(path)


def test_a_header_that_lies_about_a_size_is_refused(copy):
    path = copy()
    data = (path / SINGLE_FILE).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["model.norm.weight"]["data_offsets"][1] += 10**9
    lie = json.dumps(header).encode()
    (path / SINGLE_FILE).write_bytes(len(lie).to_bytes(8, "little") + lie + data[8 + size :])
    assert "'model.norm.weight'" in refusal(path)


@pytest.mark.parametrize(
    "name", ["../whole/model.safetensors", "/etc/passwd", "sub/x.safetensors", "..\\x.safetensors", "..", "", "x.bin"]
)
def test_an_index_that_points_elsewhere_is_refused(copy, name):
    path = copy("sharded")
    (path / INDEX_FILE).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    assert f"names the file {name!r}; it must be" in refusal(path)


def test_a_missing_shard_is_named(copy):
    path = copy("sharded")
    shard = sorted(path.glob("*.safetensors"))[1]
    shard.unlink()
    assert f"names the file {shard.name!r}, which is missing" in refusal(path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": {"a": 1}}'])
def test_a_damaged_index_is_named(copy, content):
    path = copy("sharded")
    (path / INDEX_FILE).write_text(content)
    assert f"{INDEX_FILE}: not a safetensors index" in refusal(path)


def test_a_tensor_in_two_shards_is_refused(copy):
    path = copy("sharded")
    first, second, *_ = sorted(path.glob("*.safetensors"))
    save_file(load_file(first) | load_file(second), second)
    assert f"is also in {first.name}; it must be in one" in refusal(path)


def test_shards_behind_symlinks_are_fine(originals, tmp_path):
    """The hub's cache consists of symlinks."""
    for file in originals["sharded"].iterdir():
        (tmp_path / file.name).symlink_to(file)
    assert load(tmp_path)


def test_pickles_are_never_opened(copy):
    path = copy()
    (path / SINGLE_FILE).unlink()
    torch.save({}, path / "pytorch_model.bin")
    message = refusal(path)
    assert "pytorch_model.bin cannot be used, as only safetensors and GGUF are read" in message


def test_no_weights_at_all(tmp_path):
    with pytest.raises(ModelError, match=f"neither {SINGLE_FILE} nor {INDEX_FILE}$"):
        weight_files(tmp_path)


def test_dummy_weights_depend_on_the_seed_only(originals, tmp_path):
    shutil.copy(originals["whole"] / "config.json", tmp_path)
    one, again, other = (load(tmp_path, load_format="dummy", seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])
    assert not torch.equal(one["lm_head.weight"], one["model.embed_tokens.weight"])
    down = one["model.layers.0.mlp.down_proj.weight"]
    assert abs(float(down.std()) * 96**0.5 - 1) < 0.05
    assert torch.equal(one["model.norm.weight"], torch.ones(64))
    assert torch.equal(one["model.layers.0.self_attn.q_proj.bias"], torch.zeros(64))
    half = load(tmp_path, "bfloat16", load_format="dummy", seed=1)
    assert torch.equal(half["lm_head.weight"], one["lm_head.weight"].bfloat16())


def test_an_unknown_load_format_is_refused(originals):
    with pytest.raises(ConfigError, match=r"'pt' is not supported; use auto, safetensors, gguf, dummy"):
        load(originals["whole"], load_format="pt")


def test_progress_goes_up_to_the_whole(originals):
    calls: list[tuple[int, int]] = []
    loaded = load(originals["whole"], progress=lambda done, total: calls.append((done, total)))
    total = sum(tensor.nbytes for tensor in loaded.values())
    assert len(calls) == len(loaded)
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_bar_is_shown_on_terminals_only(originals, monkeypatch, is_terminal):
    stream = io.StringIO()
    stream.isatty = lambda: is_terminal  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", stream)
    load(originals["whole"])
    assert ("loading weights" in stream.getvalue()) == is_terminal


def split(path, *names):
    """Deal the tensors of a single-file checkpoint out to files without an index."""
    tensors = load_file(path / SINGLE_FILE)
    (path / SINGLE_FILE).unlink()
    for number, name in enumerate(names):
        save_file({key: tensors[key] for key in sorted(tensors)[number :: len(names)]}, path / name)


@pytest.mark.parametrize(
    "names",
    [
        ("weights.safetensors",),
        ("gptq_model-4bit-128g.safetensors",),
        ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
        ("one.safetensors", "two.safetensors", "three.safetensors"),
    ],
)
def test_files_of_any_name_are_loaded_without_an_index(copy, originals, names):
    path = copy()
    split(path, *names)
    save_file({"tok_embeddings.weight": torch.zeros(2)}, path / "consolidated.safetensors")
    save_file({"a.lora_A.weight": torch.zeros(2)}, path / "adapter_model.safetensors")
    found, wanted = load(path), load(originals["whole"])
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_tensor_in_two_files_without_an_index_is_refused(copy):
    path = copy()
    (path / SINGLE_FILE).rename(path / "float32.safetensors")
    shutil.copy(path / "float32.safetensors", path / "other.safetensors")
    assert "float32.safetensors and other.safetensors both hold" in refusal(path)


def test_a_missing_file_of_a_numbered_series_is_named(copy):
    path = copy()
    split(path, "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors")
    with pytest.raises(ModelError, match=r"model-00002-of-00003\.safetensors is missing, one of 3 files"):
        weight_files(path)
