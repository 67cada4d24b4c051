"""Number of KV blocks that fit: the formulas of the founding documents, the report, the errors; all on a fake
device."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.checkpoints import VOCAB_SIZE
from tests.cpu.test_graphs import FakeCapture
from tests.driver import Driver
from tests.images import make_mistral3, make_onevision, make_qwen, make_smolvlm
from vllm_lite.attention.cpu import CpuBackend
from vllm_lite.attention.step_batch import PAD_SLOT
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.families.llama import FAMILIES, LlamaConfig
from vllm_lite.checkpoint.model_spec import AttentionSpec, LayerGroup, ModelSpec
from vllm_lite.checkpoint.sizing import FORCED_ROWS, configured_num_blocks, reserved_bytes
from vllm_lite.checkpoint.typed_json import convert
from vllm_lite.config import GIB, EngineConfig, ResolvedConfig
from vllm_lite.engine.blocks.groups import make_groups
from vllm_lite.engine.blocks.kv_blocks import KVBlocks
from vllm_lite.engine.blocks.pool import BlockPool
from vllm_lite.errors import ConfigError
from vllm_lite.protocol.control import Start
from vllm_lite.worker import worker as worker_module
from vllm_lite.worker.batch.step_inputs import StepInputs
from vllm_lite.worker.device import Device
from vllm_lite.worker.forward import EagerForward
from vllm_lite.worker.graphs import Capture, CpuCapture
from vllm_lite.worker.memory.profile import (
    Baseline,
    MemoryProfile,
    blocks_for,
    check_free,
    profile_memory,
    warn_if_short,
)
from vllm_lite.worker.progress import Progress
from vllm_lite.worker.step_parts.media import encode_largest
from vllm_lite.worker.worker import Worker

MIB = 2**20


class FakeMemory:
    """A fake device with set numbers of bytes. `others` are used outside of the framework, `kept` are reserved by it
    without need."""

    def __init__(self, total: int, allocated: int = 0, others: int = 0) -> None:
        self.total, self.allocated, self.others = total, allocated, others
        self.kept, self.peak = 0, allocated
        self.trims = 0

    def total_bytes(self) -> int:
        return self.total

    def free_bytes(self) -> int:
        return self.total - self.allocated - self.kept - self.others

    def allocated_bytes(self) -> int:
        return self.allocated

    def peak_bytes(self) -> int:
        return self.peak

    def reset_peak(self) -> None:
        self.peak = self.allocated

    def trim(self) -> None:
        self.kept = 0
        self.trims += 1

    def step(self, activations: int, outside: int = 0) -> None:
        """Allocate and free `activations`; libraries take `outside` for themselves."""
        self.peak = max(self.peak, self.allocated + activations)
        self.kept = max(self.kept, activations)
        self.others += outside


def profile_of(memory: FakeMemory, activations: int, outside: int = 0, **given: Any) -> MemoryProfile:
    values: dict[str, Any] = {
        "utilization": 0.9,
        "block_bytes": 2 * MIB,
        "weights": memory.allocated,
        "graphs": 0,
        "scratch": 0,
    }
    values |= given
    return profile_memory(
        memory,
        lambda: memory.step(activations, outside),
        Baseline(memory.others, values["weights"], values["scratch"], values["graphs"]),
        values["utilization"],
        values["block_bytes"],
    )


# ---- the formulas


def test_the_founding_documents_number() -> None:
    """24 GiB, 90 %, a peak of 15 GiB, blocks of 2 MiB: int((21.6 - 15) * 512)."""
    profile = profile_of(FakeMemory(24 * GIB, allocated=13 * GIB), activations=2 * GIB)
    assert profile.peak_bytes == 15 * GIB
    assert profile.num_blocks == 3379


def test_memory_outside_torch_counts_and_its_cached_memory_does_not() -> None:
    memory = FakeMemory(24 * GIB, allocated=10 * GIB, others=1 * GIB)
    profile = profile_of(memory, activations=3 * GIB, outside=1 * GIB)
    assert (profile.weights_bytes, profile.activations_bytes) == (10 * GIB, 3 * GIB)
    assert profile.non_framework_bytes == 2 * GIB
    assert profile.peak_bytes == 15 * GIB
    assert profile.num_blocks == 3379
    assert memory.trims == 2
    assert profile.initial_used_bytes == 1 * GIB


def test_the_older_formula_takes_all_that_is_in_use() -> None:
    memory = FakeMemory(24 * GIB, allocated=13 * GIB)
    memory.kept = 7 * GIB  # from loading; trimmed before the step, so that neither formula sees it
    profile = profile_of(memory, activations=2 * GIB)
    assert profile.device_wide_num_blocks(4 * GIB) == (3379, 2048)
    assert profile.num_blocks == 3379
    other = profile_of(FakeMemory(24 * GIB, allocated=13 * GIB, others=8 * GIB), activations=2 * GIB)
    assert other.device_wide_num_blocks(0) == (0, 0)


def test_a_framework_that_holds_more_than_the_device_shows_subtracts_nothing() -> None:
    values: dict[str, Any] = {
        "total_bytes": 24 * GIB,
        "utilization": 0.9,
        "block_bytes": 2 * MIB,
        "initial_used_bytes": 0,
    }
    values |= {"weights_bytes": 13 * GIB, "peak_framework_bytes": 15 * GIB}
    profile = MemoryProfile(**values, used_at_step_bytes=14 * GIB, used_bytes=12 * GIB, framework_bytes=13 * GIB)
    assert profile.non_framework_bytes == 0
    assert profile.num_blocks == 3379


@pytest.mark.parametrize("what", ["graphs", "scratch"])
def test_reserved_memory_is_left_free(what: str) -> None:
    profile = profile_of(FakeMemory(24 * GIB, allocated=13 * GIB), activations=2 * GIB, **{what: GIB})
    assert profile.num_blocks == 3379 - 512


def test_blocks_of_65536_bytes(tmp_path: Path) -> None:
    """The example of the founding documents: 4 tokens, 4 layers, 8 heads of 128 in fp16, K and V."""
    spec = spec_of(num_layers=4, heads=8)
    block_bytes = spec.kv_block_bytes(block_size=4, dtype_bytes=2)
    assert block_bytes == 65536
    profile = profile_of(FakeMemory(24 * GIB, allocated=15 * GIB), activations=0, block_bytes=block_bytes)
    assert profile.num_blocks == int((24 * GIB * 0.9 - 15 * GIB) // 65536) == 108134
    assert spec.kv_block_bytes(block_size=4, dtype_bytes=1) == 32768, "fp8"


def spec_of(num_layers: int, heads: int) -> ModelSpec:
    raw = {"architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 128 * heads, "rms_norm_eps": 1e-5}
    raw |= {"intermediate_size": 8, "num_hidden_layers": num_layers, "num_attention_heads": heads}
    raw |= {"max_position_embeddings": 64, "torch_dtype": "float16"}
    return FAMILIES["LlamaForCausalLM"].read("LlamaForCausalLM", convert(raw, LlamaConfig))


@pytest.mark.parametrize(("allocated", "num_blocks"), [(21 * GIB, 307), (22 * GIB, 0), (30 * GIB, 0)])
def test_never_fewer_than_none(allocated: int, num_blocks: int) -> None:
    assert profile_of(FakeMemory(24 * GIB, allocated), 0).num_blocks == num_blocks


# ---- the report


def test_the_report_has_the_known_names() -> None:
    memory = FakeMemory(24 * GIB, allocated=10 * GIB, others=1 * GIB)
    measured, split = profile_of(memory, 3 * GIB, outside=GIB, graphs=GIB // 4, scratch=GIB // 4).lines(4 * GIB)
    assert measured == (
        "memory_profile: total_gpu_memory=24.00GiB initial_memory_usage=1.00GiB peak_torch_memory=13.00GiB "
        "memory_usage_post_profile=12.00GiB non_torch_memory=2.00GiB kv_cache_size=6.10GiB gpu_memory_utilization=0.90"
    )
    assert split == (
        "memory: weights 10.00GiB, activations 3.00GiB, attention over long contexts 0.25GiB, CUDA graphs 0.25GiB, "
        "logits of drafts 0.00GiB, outside the framework 2.00GiB, KV cache 6.10GiB = 3123 blocks of 2.00 MiB "
        "(3379 if all memory in use counted), host tier 2048 blocks"
    )


def test_too_little_is_an_error_with_a_flag_that_works() -> None:
    memory = FakeMemory(24 * GIB, allocated=20 * GIB)
    profile = profile_of(memory, activations=2 * GIB)
    with pytest.raises(ConfigError, match=r"no memory for KV blocks: .* weights take 20\.00GiB, activations 2\.00GiB"):
        profile.check()
    with pytest.raises(ConfigError) as info:
        profile.check(100)
    advised = float(re.findall(r"--gpu-memory-utilization (\d\.\d+)", str(info.value))[0])
    assert profile_of(memory, 2 * GIB, utilization=advised).num_blocks >= 100
    assert profile_of(memory, 2 * GIB, utilization=advised - 0.01).num_blocks < 100


def test_advice_names_only_flags_that_can_help() -> None:
    with pytest.raises(ConfigError) as info:
        profile_of(FakeMemory(24 * GIB, allocated=24 * GIB), 2 * GIB).check()
    assert "--gpu-memory-utilization" not in str(info.value)
    assert "--max-num-batched-tokens" in str(info.value)


def test_a_device_that_others_use_is_an_error_at_once() -> None:
    memory = FakeMemory(24 * GIB, others=6 * GIB)
    assert check_free(FakeMemory(24 * GIB, others=2 * GIB), 0.9) == 2 * GIB
    with pytest.raises(ConfigError, match=r"18\.00GiB of the GPU's 24\.00GiB are free.*asks for 21\.60GiB") as info:
        check_free(memory, 0.9)
    advised = float(re.findall(r"--gpu-memory-utilization (\d\.\d+)", str(info.value))[-1])
    assert check_free(memory, advised) == 6 * GIB
    with pytest.raises(ConfigError, match="use another device"):
        check_free(FakeMemory(24 * GIB, others=24 * GIB), 0.9)


# ---- configured sizes


def config_of(device: str = "cpu", **values: Any) -> ResolvedConfig:
    config = EngineConfig.check(values).resolve(max_position_embeddings=4096, dtype="float32", model_path="m")
    return msgspec.structs.replace(config, device=device)


def test_a_number_wins_over_bytes_and_bytes_over_a_share() -> None:
    assert configured_num_blocks(config_of(num_gpu_blocks_override=7, kv_cache_memory_bytes=MIB), 1024) == 7
    assert configured_num_blocks(config_of(kv_cache_memory_bytes=MIB, cpu_kvcache_space=1), 1000) == 1048
    assert configured_num_blocks(config_of(cpu_kvcache_space=0.5), 65536) == GIB // 2 // 65536 == 8192
    assert configured_num_blocks(config_of(device="cuda"), 65536) is None
    assert configured_num_blocks(config_of(device="cuda", kv_cache_memory_bytes=65536 * 9), 65536) == 9


def test_bytes_for_less_than_two_blocks_are_refused_with_enough() -> None:
    with pytest.raises(ConfigError, match=r"hold 1 of 65536 bytes; give --kv-cache-memory-bytes 131072 or more"):
        configured_num_blocks(config_of(kv_cache_memory_bytes=131071), 65536)


@pytest.mark.parametrize("windows", [(None,), (24,), (None, 24), (24, 100)], ids=str)
@pytest.mark.parametrize("num_blocks", [2, 5, 9, 30])
def test_the_longest_sequence_is_the_engines(
    windows: tuple[int | None, ...], num_blocks: int, caplog: pytest.LogCaptureFixture
) -> None:
    groups = [LayerGroup((0,), AttentionSpec(1, 1, 8, 1.0, window)) for window in windows]
    longest = KVBlocks(BlockPool(num_blocks, False), make_groups(windows, 16), 16).max_tokens(400, 32)
    config = config_of(max_model_len=400, max_num_batched_tokens=32)
    with caplog.at_level(logging.WARNING, "vllm_lite"):
        warn_if_short(num_blocks, 1024, groups, config)
    if longest == 400:
        assert not caplog.records
        assert blocks_for(400, groups, 16, 32) <= num_blocks
    else:
        assert f"at most {longest} tokens" in caplog.text


# ---- through the worker


def fake_gpu(total: int = GIB, *, graphs: bool = False) -> tuple[Device, FakeMemory]:
    memory = FakeMemory(total)
    return Device(torch.device("cpu"), memory, FakeCapture() if graphs else None), memory


def worker_on(device: Device, checkpoint: Path, **settings: Any) -> Worker:
    """A worker that takes itself to be on a GPU."""
    config = EngineConfig.check({"max_num_batched_tokens": 64, "max_num_seqs": 8} | settings)
    spec = load_spec(checkpoint)
    resolved = config.resolve(
        max_position_embeddings=spec.max_position_embeddings, dtype="float32", model_path=str(checkpoint)
    )
    return Worker(msgspec.structs.replace(resolved, device="cuda"), 0, Progress(), device)


@pytest.mark.parametrize("graphs", [False, True])
def test_a_worker_profiles_its_device(tiny_checkpoint: Path, graphs: bool, caplog: pytest.LogCaptureFixture) -> None:
    device, memory = fake_gpu(total=180 * MIB, graphs=graphs)
    worker = worker_on(device, tiny_checkpoint)
    steps: list[int] = []
    inner = worker.run_largest_step

    def step() -> None:
        inner()
        steps.append(worker.progress.count)
        memory.step(activations=100 * MIB, outside=10 * MIB)

    worker.run_largest_step = step  # type: ignore[method-assign]
    with caplog.at_level(logging.INFO, "vllm_lite"):
        ready = worker.load()
    assert len(steps) == 1
    assert steps[0] >= 2, "the largest step went through both layers"
    workspace = worker.backend.workspace_bytes
    set_aside = workspace(64, 8, 512) - workspace(64, 8, 8) + FORCED_ROWS * 2 * 4 * VOCAB_SIZE
    if graphs:
        set_aside += reserved_bytes((1, 2, 4, 8), VOCAB_SIZE, 32, 1)
    block_bytes = 2 * 2 * 16 * 2 * 16 * 4  # layers, K and V, tokens, heads, head size, bytes
    assert ready.block_bytes == block_bytes
    assert ready.num_blocks == int((180 * MIB * 0.9 - 110 * MIB - set_aside) // block_bytes)
    assert "memory_profile: total_gpu_memory=0.18GiB" in caplog.text
    worker.start(Start(1, 20, 0))


@pytest.mark.parametrize("captures", [FakeCapture, CpuCapture], ids=["at the start", "on demand"])
def test_rows_of_drafts_are_set_aside(
    tiny_checkpoint: Path, captures: type[Capture], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with drafts sample more tokens than there are sequences. Where such steps are recorded, they also attend
    with more rows."""

    def workspace_bytes(_: CpuBackend, num_tokens: int, num_seqs: int, max_seq_len: int) -> int:
        return num_tokens + 10 * num_seqs * max_seq_len

    monkeypatch.setattr(CpuBackend, "workspace_bytes", workspace_bytes)
    num_rows, sizes = (56, tuple(range(1, 57))) if captures is CpuCapture else (8, (1, 2, 4, 8))
    set_aside = reserved_bytes(sizes, VOCAB_SIZE, 32, 1) + 48 * 2 * 4 * VOCAB_SIZE + 10 * (num_rows * 512 - 8 * 8)
    total = int((set_aside + 50 * MIB) / 0.9)
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 6}, "attention_backend": "cpu"}
    worker = worker_on(Device(torch.device("cpu"), FakeMemory(total), captures()), tiny_checkpoint, **drafts)
    worker.run_largest_step = lambda: None  # type: ignore[method-assign]
    ready = worker.load()
    assert worker.graph_sizes == sizes
    assert ready.num_blocks == int((total * 0.9 - set_aside) // ready.block_bytes)


def test_steps_in_which_all_sequences_draft_are_recorded_on_a_cpu(tiny_checkpoint: Path) -> None:
    """Eager steps of that many rows take new memory for their logits each time."""
    device = Device(torch.device("cpu"), FakeMemory(GIB), CpuCapture())
    settings: dict[str, Any] = {"max_num_seqs": 20, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 40}
    for drafts, most in ((8, 180), (15, 256)):
        speculation = {"method": "ngram", "num_speculative_tokens": drafts}
        worker = worker_on(device, tiny_checkpoint, speculative_config=speculation, **settings)
        worker.load()
        assert worker.graph_sizes == tuple(range(1, most + 1))


def test_a_device_much_larger_than_the_model_is_not_filled(tiny_checkpoint: Path) -> None:
    """A block costs the engine memory, too, and the time to make it."""
    device, _ = fake_gpu(total=64 * GIB)
    worker = worker_on(device, tiny_checkpoint, max_num_seqs=200, max_num_batched_tokens=256)
    assert worker.load().num_blocks == 4 * 200 * 512 // 16


def test_the_largest_step_is_the_largest(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device, _ = fake_gpu()
    worker = worker_on(device, tiny_checkpoint, max_num_batched_tokens=96, max_num_seqs=5)
    seen: list[StepInputs] = []
    hidden = EagerForward.hidden

    def watched(self: EagerForward, inputs: StepInputs) -> torch.Tensor:
        seen.append(inputs)
        return hidden(self, inputs)

    monkeypatch.setattr(EagerForward, "hidden", watched)
    worker.load()
    assert [(inputs.num_tokens, len(inputs.rows), len(inputs.sampling)) for inputs in seen] == [(96, 5, 5)]
    assert (seen[0].slot_mapping[0] == PAD_SLOT).all()
    assert not seen[0].block_tables[0].any()


@pytest.mark.parametrize("make", [make_smolvlm, make_qwen, make_mistral3, make_onevision])
def test_the_largest_step_sees_images(
    make: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest step has as many images as a step may compute, while memory is reserved for all vectors that workers
    may keep."""
    device, _ = fake_gpu()
    worker = worker_on(device, make(tmp_path / "m"), max_num_batched_tokens=96, max_num_seqs=5)
    seen, held = list[int](), list[torch.Size]()

    def encoded(tower: Any, max_num_tokens: int) -> torch.Tensor:
        found = encode_largest(tower, max_num_tokens)
        seen.append(max_num_tokens)
        held.append(found.shape)
        return found

    monkeypatch.setattr(worker_module, "encode_largest", encoded)
    worker.load()
    assert (seen, held) == ([96], [torch.Size([8192, 64])])
    tower = worker.model.tower
    assert tower is not None
    pixels = sum(image.shape[0] * image.shape[1] for image in tower.largest(96))
    assert pixels >= (81 * 16**2 if make in (make_qwen, make_mistral3) else 4 * 28**2)


@pytest.mark.parametrize("settings", [{"num_gpu_blocks_override": 30}, {"kv_cache_memory_bytes": 30 * 8192}], ids=str)
def test_no_profile_where_the_size_is_given(tiny_checkpoint: Path, settings: dict[str, Any]) -> None:
    device, memory = fake_gpu(total=MIB)
    memory.others = memory.total  # no memory is free, but the amount is not read
    worker = worker_on(device, tiny_checkpoint, **settings)
    worker.run_largest_step = lambda: pytest.fail("profiled")  # type: ignore[method-assign]
    assert worker.load().num_blocks == 30


def test_a_gpu_that_is_too_small_is_the_users_fault(tiny_checkpoint: Path) -> None:
    device, memory = fake_gpu(total=64 * MIB)
    worker = worker_on(device, tiny_checkpoint)
    worker.run_largest_step = lambda: memory.step(60 * MIB)  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="no memory for KV blocks"):
        worker.load()


# ---- types of the cache


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("auto", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float16),
        ("fp8", torch.float8_e4m3fn),
        ("fp8_e5m2", torch.float8_e5m2),
        ("int8", torch.int8),
    ],
)
def test_the_cache_has_the_type_asked_for(tiny_checkpoint: Path, name: str, dtype: torch.dtype) -> None:
    driver = Driver(tiny_checkpoint, kv_cache_dtype=name, attention_backend="reference")
    assert driver.worker.runner.cache_engine.pool.dtype == dtype
    assert driver.ready.block_bytes == 2 * 2 * 16 * 2 * (16 * dtype.itemsize + (4 if name == "int8" else 0))
    assert driver.worker.runner.cache_engine.pool[0].nbytes == driver.ready.block_bytes
