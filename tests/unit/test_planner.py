"""`vllm-lite plan`: sizes from headers, advice if nothing fits, and a check that the advice holds."""

import json
import re
import shlex
import subprocess
import sys
from math import ceil, prod
from pathlib import Path
from typing import Any

import pytest

from tests.deadlines import scaled
from tests.unit.test_import_time import loaded_by
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.draft_model import with_drafter
from vllm_lite.checkpoint.model_spec import LayerGroup
from vllm_lite.checkpoint.quantization.mixed import MixedForm
from vllm_lite.checkpoint.quantization.on_load import Quantization
from vllm_lite.checkpoint.shard import Shard
from vllm_lite.checkpoint.sizing import configured_num_blocks
from vllm_lite.checkpoint.tensors.headers import Tensor, read_headers
from vllm_lite.checkpoint.tensors.weight_bytes import Checkpoint, active_bytes, copy_bytes, weights_bytes
from vllm_lite.client.engines import launch
from vllm_lite.config import GIB, EngineConfig, demo_folder
from vllm_lite.errors import ConfigError, ModelError
from vllm_lite.runtime.machine import Gpu, parse_bytes
from vllm_lite.tools import cli
from vllm_lite.tools import plan as planning
from vllm_lite.tools.cli import main
from vllm_lite.tools.plan import PlanConfig, make_plan
from vllm_lite.tools.plan_checkpoint import load

FIXTURES = Path(__file__).parents[1] / "fixtures" / "configs"


def checkpoint(tmp_path: Path, name: str = "llama_new", **changes: Any) -> Checkpoint:
    """A model of a real config.json, with the tensors that it must have."""
    values = json.loads((FIXTURES / f"{name}.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(values))
    spec = load_spec(tmp_path)
    hidden, inner, head = spec.hidden_size, spec.intermediate_size, spec.layers[0].attention.head_size
    heads = spec.layers[0].attention
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    for layer in range(spec.num_layers):
        at = f"model.layers.{layer}."
        shapes |= {at + f"self_attn.{name}_proj.weight": (heads.num_kv_heads * head, hidden) for name in "kv"}
        shapes |= {at + "self_attn.q_proj.weight": (heads.query_size, hidden)}
        shapes |= {at + "self_attn.o_proj.weight": (hidden, heads.query_size)}
        shapes |= {at + f"mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes |= {at + "mlp.down_proj.weight": (hidden, inner)}
        shapes |= {at + f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        shapes |= {at + f"self_attn.{name}_norm.weight": (head,) for name in "qk" if spec.qk_norm}
    shapes["model.norm.weight"] = (hidden,)
    return Checkpoint(spec, {name: Tensor("BF16", shape) for name, shape in shapes.items()})


def config(**given: Any) -> PlanConfig:
    return PlanConfig.load({"model": "m", **given}, env={})


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("24GiB", 24 * GIB),
        ("24G", 24 * GIB),
        ("9 gb", 9 * 10**9),
        ("512MiB", 2**29),
        ("1.5T", 1536 * GIB),
        ("2000000", 2_000_000),
    ],
)
def test_amounts_of_memory(text: str, num_bytes: int) -> None:
    assert parse_bytes("gpu", text) == num_bytes


@pytest.mark.parametrize("text", ["", "lots", "0GiB", "-1G", "24 GiBs", "24", "1048575"])
def test_no_amounts_of_memory(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^gpu: expected an amount of memory like 24GiB, got "):
        parse_bytes("gpu", text)


def test_an_encoder_has_no_kv_cache(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    raw = {"architectures": ["BertModel"], "model_type": "bert", "vocab_size": 100, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(raw | sizes))
    encoder = Checkpoint(load_spec(tmp_path), {"embeddings.word_embeddings.weight": Tensor("F32", (100, 64))})
    for machine in ({"memory": "4GiB", "device": "cpu"}, {"gpu": "4GiB"}):
        plan = make_plan(config(max_num_batched_tokens=2048, **machine), encoder)
        assert plan.fits
        assert (plan.kv_cache_bytes, plan.kv_tokens, plan.graph_bytes) == (0, 0, 0)
        assert (plan.max_model_len, plan.concurrent_requests) == (512, 4)
    assert not make_plan(config(memory="64MiB", device="cpu"), encoder).fits


def test_weights_are_the_headers_tensors_in_the_dtype(tmp_path: Path) -> None:
    model = checkpoint(tmp_path)
    total = sum(tensor.num_elements for tensor in model.tensors.values())
    assert total == model.spec.num_parameters()
    assert weights_bytes(model, 2) == 2 * total
    assert weights_bytes(model, 4) == 4 * total
    more = Checkpoint(
        model.spec, {**model.tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": Tensor("F32", (64,))}
    )
    assert weights_bytes(more, 2) == 2 * total


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.7000.self_attn.q_proj.weight", (64, 8)),
        ("model.norm.q_proj.weight", (64, 8)),
        ("model.layers.0.self_attn.o_proj.weight", (512,)),
        ("model.layers.0.self_attn.q_proj.weight", ()),
    ],
)
def test_unknown_tensors_count_whole_on_every_rank(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    """Headers are a stranger's."""
    model = checkpoint(tmp_path)
    others = {key: tensor for key, tensor in model.tensors.items() if key != name}
    more = Checkpoint(model.spec, others | {name: Tensor("BF16", shape)})
    plain = Checkpoint(model.spec, others)
    shard = Shard(1, 2)
    assert weights_bytes(more, 2, shard=shard) - weights_bytes(plain, 2, shard=shard) == 2 * prod(shape)


def groups_bytes(shape: tuple[int, ...], cell: int, shared: int = 0, group: int = 32) -> int:
    """Bytes of a matrix with `cell` for each group of inputs and `shared` for each 256."""
    return shape[0] * (ceil(shape[1] / group) * cell + ceil(shape[1] / 256) * shared)


def int8_bytes(shape: tuple[int, ...]) -> int:
    """Bytes of a matrix on a CPU, with tiles or without: groups have 128 inputs there, or 32."""
    return max(groups_bytes(shape, 32 + 4), groups_bytes(shape, 128 + 4, 0, 128))


@pytest.mark.parametrize("hidden_size", [256, 576])
def test_int8_weights_have_a_byte_and_four_for_each_group(tmp_path: Path, hidden_size: int) -> None:
    model = checkpoint(tmp_path, hidden_size=hidden_size)
    spec = model.spec
    matrices = {name: tensor for name, tensor in model.tensors.items() if len(tensor.shape) == 2}
    vectors = sum(tensor.num_elements for name, tensor in model.tensors.items() if name not in matrices)
    table = 2 * matrices.pop("model.embed_tokens.weight").num_elements
    shapes = [tensor.shape for tensor in matrices.values()]
    shapes += [(spec.vocab_size, spec.hidden_size)] if spec.tie_word_embeddings else []
    expected = sum(map(int8_bytes, shapes)) + 2 * vectors + table
    assert weights_bytes(model, 2, "int8") == expected
    on_gpu = sum(groups_bytes(shape, 32 + 2) for shape in shapes) + 2 * vectors + table
    assert weights_bytes(model, 2, "int8", device="cuda") == on_gpu


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_reads_the_head_and_not_the_table(tmp_path: Path, tied: bool) -> None:
    """The two are the same where the model ties them, unless the head is a quantized copy."""
    model = checkpoint(tmp_path, tie_word_embeddings=tied)
    table = 2 * model.tensors["model.embed_tokens.weight"].num_elements
    assert active_bytes(model, 2) == weights_bytes(model, 2) - (0 if tied else table)
    forms: tuple[Quantization, ...] = ("int8", "int4_g32")
    for form in forms:
        assert active_bytes(model, 2, form) == weights_bytes(model, 2, form) - table


@pytest.mark.parametrize("hidden_size", [256, 320])
def test_int4_and_fp8_weights_have_their_codes_and_the_scales_of_their_groups(tmp_path: Path, hidden_size: int) -> None:
    model = checkpoint(tmp_path, hidden_size=hidden_size, tie_word_embeddings=False)
    matrices = {name: tensor.shape for name, tensor in model.tensors.items() if len(tensor.shape) == 2}
    vectors = sum(tensor.num_elements for name, tensor in model.tensors.items() if name not in matrices)
    table = 2 * prod(matrices.pop("model.embed_tokens.weight"))
    head = matrices.pop("lm_head.weight")
    mixed = MixedForm.of(model.spec, "int4_g32", "cpu")
    assert mixed is not None

    def expected(group: int, cell: int, shared: int = 0) -> int:
        return sum(groups_bytes(shape, cell, shared, group) for shape in matrices.values()) + 2 * vectors + table

    made = {
        "int8": int8_bytes,
        "int5_g32": lambda shape: groups_bytes(shape, 20 + 2, 8),
        "int4_g32": lambda shape: groups_bytes(shape, 16 + 2, 8),
    }
    more = sum(made[mixed.form(name)](shape) - made["int4_g32"](shape) for name, shape in matrices.items())
    assert more > 0
    assert weights_bytes(model, 2, "int4") == expected(128, 64 + 4) + int8_bytes(head)
    assert weights_bytes(model, 2, "int4_g32") == expected(32, 16 + 2, 8) + int8_bytes(head) + more
    assert weights_bytes(model, 2, "int4_g32", device="cuda") == expected(32, 16 + 4) + groups_bytes(head, 34)
    assert weights_bytes(model, 2, "fp8") == expected(128, 128 + 2) + groups_bytes(head, 130, 0, 128)


def test_ranks_share_matrices_and_repeat_kv_heads(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, vocab_size=2**17)
    heads = model.spec.layers[0].attention.num_kv_heads
    kv = sum(tensor.num_elements for name, tensor in model.tensors.items() if ".k_proj" in name or ".v_proj" in name)
    vectors = sum(tensor.num_elements for tensor in model.tensors.values() if len(tensor.shape) == 1)
    others = model.spec.num_parameters() - kv - vectors
    assert weights_bytes(model, 2, shard=Shard(0, 2)) == others + kv + 2 * vectors
    assert weights_bytes(model, 2, shard=Shard(0, 2 * heads)) == others // heads + 2 * kv // heads + 2 * vectors


def test_ranks_on_one_machine_share_its_memory(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, tie_word_embeddings=False)
    heads = model.spec.layers[0].attention
    asked: dict[str, Any] = {"memory": "200GiB", "max_model_len": 4096}
    one, two = (make_plan(config(**asked, tensor_parallel_size=tp), model) for tp in (1, 2))
    vectors = 2 * sum(tensor.num_elements for tensor in model.tensors.values() if len(tensor.shape) == 1)
    assert two.weights_bytes == one.weights_bytes + vectors == sum(rank.weights_bytes for rank in two.ranks)
    assert (two.num_blocks, two.block_bytes) == (one.num_blocks, one.block_bytes)
    assert sum(rank.kv_cache_bytes for rank in two.ranks) == two.kv_cache_bytes == one.kv_cache_bytes
    assert [rank.num_kv_heads for rank in two.ranks] == [heads.num_kv_heads // 2] * 2
    assert two.outside_bytes > one.outside_bytes
    assert one.ranks == ()
    assert two.command == "vllm-lite serve m --max-model-len 4096 --tensor-parallel-size 2"
    many = make_plan(config(**asked, tensor_parallel_size=2 * heads.num_kv_heads), model)
    assert many.block_bytes == 2 * one.block_bytes, "each KV head is held twice"
    assert many.num_blocks < one.num_blocks, "in the same memory"


def test_each_worker_has_the_kv_cache_of_the_plan(tmp_path: Path) -> None:
    model = checkpoint(tmp_path)
    asked: dict[str, Any] = {"memory": "200GiB", "max_model_len": 4096, "concurrency": 100}
    plan = make_plan(config(**asked, tensor_parallel_size=2), model)
    given = plan.ranks[0].kv_cache_bytes
    assert given > 2 * GIB
    assert f"--kv-cache-memory-bytes {given}" in plan.command
    again = make_plan(config(**asked, tensor_parallel_size=2, kv_cache_memory_bytes=given), model)
    assert again.num_blocks == plan.num_blocks
    assert again.fits
    swapping = make_plan(config(**asked, tensor_parallel_size=2, swap_space=1), model)
    assert swapping.num_host_blocks == 2 * GIB // plan.block_bytes
    assert swapping.needed_bytes - plan.needed_bytes == swapping.num_host_blocks * plan.block_bytes


def test_ranks_that_hold_different_parts(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 1000}
    plan = make_plan(config(gpu="24GiB", tensor_parallel_size=2), checkpoint(tmp_path, **changes))
    assert [(rank.num_heads, rank.num_kv_heads, rank.vocabulary) for rank in plan.ranks] == [
        (3, 1, (0, 512)),
        (2, 1, (512, 1000)),
    ]
    assert plan.weights_bytes == plan.ranks[0].weights_bytes > plan.ranks[1].weights_bytes, "the plan is the first's"
    machine = make_plan(config(memory="24GiB", tensor_parallel_size=2), checkpoint(tmp_path, **changes))
    assert machine.weights_bytes == sum(rank.weights_bytes for rank in plan.ranks), "not twice the first's"


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_the_plans_blocks_are_those_that_the_engine_resolves(tp: int) -> None:
    """With KV heads split, and held by several ranks."""
    settings = {"device": "cpu", "tensor_parallel_size": tp, "cpu_kvcache_space": 0.01}
    plan = make_plan(PlanConfig.load(settings, env={}), load(PlanConfig()))
    resolved = launch.resolve(EngineConfig.load(settings, env={}))
    rank_block_bytes = load_spec(demo_folder()).kv_block_bytes(16, 2, tp)
    assert plan.num_blocks == configured_num_blocks(resolved, rank_block_bytes)
    assert plan.block_bytes == tp * rank_block_bytes


def test_a_draft_model_takes_its_weights_buffers_and_kv() -> None:
    """The demo model drafts for itself: all of it is there twice, in blocks of twice the bytes, as workers have it."""
    settings: dict[str, Any] = {"device": "cpu", "memory": "4GiB", "tensor_parallel_size": 2}
    alone = make_plan(PlanConfig.load(settings, env={}), load(PlanConfig()))
    settings["speculative_config"] = {"model": demo_folder()}
    drafting = PlanConfig.load(settings, env={})
    plan = make_plan(drafting, load(drafting))
    assert plan.weights_bytes == 2 * alone.weights_bytes
    assert plan.block_bytes == 2 * alone.block_bytes
    assert plan.activations_bytes > alone.activations_bytes
    del settings["memory"]
    resolved = launch.resolve(EngineConfig.load(settings, env={}))
    whole = load_spec(demo_folder())
    spec = with_drafter(resolved, whole)
    assert spec.kv_block_bytes(16, 2, 2) == 2 * whole.kv_block_bytes(16, 2, 2) == plan.block_bytes // 2


@pytest.mark.parametrize("tp", [1, 2])
def test_a_copy_in_4_bits_takes_its_weights_and_buffers_and_no_kv(tp: int) -> None:
    settings: dict[str, Any] = {"device": "cpu", "memory": "4GiB", "tensor_parallel_size": tp}
    alone, of_demo = make_plan(PlanConfig.load(settings, env={}), load(PlanConfig())), load(PlanConfig())
    settings["speculative_config"] = {"method": "self"}
    config = PlanConfig.load(settings, env={})
    plan = make_plan(config, load(config))
    copies = [copy_bytes(of_demo, 2, shard=shard) for shard in Shard.of(config).all_ranks]
    assert plan.weights_bytes == alone.weights_bytes + sum(copies)
    assert 0.2 < sum(copies) / alone.weights_bytes < 0.5
    assert plan.block_bytes == alone.block_bytes
    assert plan.activations_bytes > alone.activations_bytes


def test_drafts_take_the_logits_of_their_rows() -> None:
    settings: dict[str, Any] = {"device": "cpu", "memory": "4GiB", "max_num_seqs": 4, "max_num_batched_tokens": 16}
    settings["jump_forward"] = False
    plans = []
    for drafts in (None, 2, 6):
        if drafts is not None:
            settings["speculative_config"] = {"method": "ngram", "num_speculative_tokens": drafts}
        plans.append(make_plan(PlanConfig.load(settings, env={}), load(PlanConfig())))
    logits_bytes = [3 * 4 * num_rows * load_spec(demo_folder()).vocab_size for num_rows in (4, 12, 16)]
    growth = [plan.activations_bytes - plans[0].activations_bytes for plan in plans]
    assert growth[1] >= logits_bytes[1] - logits_bytes[0]
    assert growth[1] < growth[2] < 2 * growth[1], "a step has 16 tokens at most"
    assert len({plan.weights_bytes for plan in plans}) == 1


def test_ranks_that_cannot_be(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["plan", "-tp", "3", "--memory", "8GiB"]) == 2
    assert "tensor_parallel_size 3 does not fit this model, whose 8 heads with 2 KV heads" in capsys.readouterr().err
    monkeypatch.setattr(PlanConfig, "resolve_device", lambda _: "cuda")
    found = [Gpu("H200", 141 * GIB, "580.1"), Gpu("A100", 40 * GIB, "580.1"), Gpu("T4", 16 * GIB, "580.1")]
    monkeypatch.setattr(planning, "gpus", lambda: found)
    assert main(["plan", "-tp", "4"]) == 2
    assert "tensor_parallel_size 4 needs a GPU for each rank, and this machine has 3; give --gpu" in (
        capsys.readouterr().err
    )
    assert main(["plan", "-tp", "4", "--tensor-parallel-backend", "gloo"]) == 0
    assert main(["plan", "-tp", "2"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"memory +40.00 GiB  of a GPU of 2, 36.00 GiB to use", printed)
    assert re.search(r"rank 1 +2.63 MiB  weights, KV cache .*; 4 heads with 1 KV, tokens 1,024 to 2,047\n", printed)


def test_bytes_of_a_token_with_sliding_windows(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, "qwen3_mixed_new")
    spec = model.spec
    plan = make_plan(config(gpu="80GiB"), model)
    full = [group for group in spec.kv_groups if group.window is None]
    block = max(len(group.layers) for group in spec.kv_groups) * 2 * 16 * 8 * 128 * 2
    assert plan.block_bytes == block
    assert plan.kv_bytes_per_token == len(spec.kv_groups) * block // 16
    assert plan.kv_bytes_per_token_beyond_windows == len(full) * block // 16 < plan.kv_bytes_per_token
    assert plan.kv_tokens == (plan.num_blocks - 1) // len(spec.kv_groups) * 16


def test_only_windows_serve_any_length(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, "mistral_new")
    sliding = Checkpoint(model.spec, model.tensors)
    assert isinstance(sliding.spec.kv_groups[0], LayerGroup)
    window = sliding.spec.kv_groups[0].window
    assert window is not None
    blocks = -(-(window - 1 + 512) // 16) + 4
    plan = make_plan(config(memory="100GiB", num_gpu_blocks_override=blocks, kv_watermark=0), sliding)
    assert plan.max_model_len == sliding.spec.max_position_embeddings
    assert plan.concurrent_requests == 1
    assert plan.kv_bytes_per_token_beyond_windows == 0


def test_a_gpu_that_is_large_enough(tmp_path: Path) -> None:
    plan = make_plan(config(gpu="80GiB", max_model_len=4096, concurrency=8), checkpoint(tmp_path))
    assert plan.fits
    assert plan.device == "cuda"
    assert plan.usable_bytes == int(80 * GIB * 0.9)
    used = plan.weights_bytes + plan.activations_bytes + plan.graph_bytes + plan.outside_bytes + plan.kv_cache_bytes
    assert plan.usable_bytes - plan.block_bytes < used <= plan.usable_bytes
    assert plan.concurrent_requests >= 8
    assert plan.command == "vllm-lite serve m --max-model-len 4096"


def test_a_step_bounds_the_sequences_of_a_plan(tmp_path: Path) -> None:
    few = make_plan(config(memory="200GiB", max_num_batched_tokens=32, max_model_len=64), checkpoint(tmp_path))
    assert few.max_num_seqs == 32
    many = make_plan(config(memory="200GiB", concurrency=600, max_model_len=64), checkpoint(tmp_path))
    assert many.max_num_seqs == 512
    assert many.problems == ("max_num_batched_tokens 512 is less than the 600 requests asked for",)


def worked(advice: str, asked: dict[str, Any], model: Checkpoint) -> bool:
    """Whether a plan with the flags of one line of advice fits."""
    if found := re.fullmatch(r"a (GPU|machine) with ([\d.]+) GiB of memory", advice):
        return make_plan(config(**asked | {"gpu" if found[1] == "GPU" else "memory": f"{found[2]}GiB"}), model).fits
    words = shlex.split(advice.partition(", on ")[0])
    flags = {words[i][2:].replace("-", "_"): words[i + 1] for i in range(0, len(words), 2)}
    return make_plan(config(**asked | flags), model).fits


@pytest.mark.parametrize(
    "asked",
    [
        {"gpu": "12GiB"},
        {"gpu": "16GiB", "max_model_len": 8192, "concurrency": 200},
        {"gpu": "17GiB", "max_model_len": 8192, "concurrency": 4},
        {"memory": "20GiB", "max_model_len": 8192, "concurrency": 64},
        {"memory": "4GiB"},
        {"gpu": "24GiB", "num_gpu_blocks_override": 20, "max_model_len": 8000},
    ],
)
def test_advice_for_an_impossible_plan_works(tmp_path: Path, asked: dict[str, Any]) -> None:
    changes: dict[str, Any] = {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336}
    changes |= {"vocab_size": 128256, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    model = checkpoint(tmp_path, **changes, tie_word_embeddings=False, max_position_embeddings=131072)
    assert model.spec.num_parameters() == pytest.approx(8e9, rel=0.05)
    plan = make_plan(config(**asked), model)
    assert not plan.fits
    assert plan.advice
    for advice in plan.advice:
        assert worked(advice, asked, model), advice


def test_on_a_cpu_the_plan_gives_the_cache_its_size(tmp_path: Path) -> None:
    model = checkpoint(tmp_path)
    small = make_plan(config(memory="200GiB", max_model_len=4096), model)
    assert small.kv_cache_bytes // small.block_bytes * small.block_bytes <= 4 * GIB
    plan = make_plan(config(memory="200GiB", max_model_len=4096, concurrency=100), model)
    assert plan.fits
    assert plan.kv_cache_bytes > 4 * GIB
    assert plan.concurrent_requests == plan.max_num_seqs == 100
    flags = f"--max-model-len 4096 --max-num-seqs 100 --kv-cache-memory-bytes {plan.kv_cache_bytes}"
    assert plan.command == f"vllm-lite serve m {flags}"
    tight = make_plan(config(memory="3.5GiB", max_model_len=4096), model)
    assert tight.kv_cache_bytes < 3.5 * GIB / 4, "less than an engine would take, as the weights leave less"
    assert tight.command == f"vllm-lite serve m --max-model-len 4096 --kv-cache-memory-bytes {tight.kv_cache_bytes}"
    given = make_plan(config(memory="200GiB", max_model_len=4096, concurrency=100, cpu_kvcache_space=1), model)
    assert not given.fits, "a size that was given is kept"


def test_the_commands_exit_status_and_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plan", "--gpu", "24GiB", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    headers = read_headers(Path(demo_folder()))
    assert printed["weights_bytes"] == 2 * sum(tensor.num_elements for tensor in headers.values())
    assert printed["fits"] is True
    assert main(["plan", "demo", "--gpu", "1GiB"]) == 1
    printed_text = capsys.readouterr().out
    assert "It does not fit: weights and activations take" in printed_text
    assert "a GPU with 1.3 GiB of memory" in printed_text
    assert main(["plan", str(tmp_path)]) == 2
    assert "config.json: no such file" in capsys.readouterr().err
    assert main(["plan", "--gpu", "1GiB", "--memory", "1GiB"]) == 2
    assert main(["plan", "--max-model-len", "3000"]) == 2


def test_a_damaged_header_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((Path(demo_folder()) / "config.json").read_text())
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 98362432\n"
    for data, text in (
        (b"\xff" * 100, "is truncated or no such file"),
        (b"\2" + bytes(7) + b"[]", "not a valid"),
        (pointer, r"model\.safetensors: is the pointer of Git LFS .* run `git lfs pull`"),
    ):
        (tmp_path / "model.safetensors").write_bytes(data)
        with pytest.raises(ModelError, match=text):
            load(config(model=str(tmp_path)))


def test_a_plan_loads_neither_torch_nor_the_hub() -> None:
    assert "plan" in cli.COMMANDS
    statement = "from vllm_lite.tools.cli import main\nassert main(['plan', '--memory', '8GiB']) == 0"
    assert loaded_by(statement).isdisjoint({"torch", "numpy", "safetensors", "huggingface_hub", "zmq"})


def test_plan_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vllm_lite", "plan", "--gpu", "16GiB"],
        capture_output=True,
        text=True,
        timeout=scaled(60),
    )
    assert done.returncode == 0, done.stderr
    assert "It fits. vllm-lite serve" in done.stdout
