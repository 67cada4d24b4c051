"""Device that a worker opens, and the threads it computes with."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from vllm_lite.config import EngineConfig, ResolvedConfig
from vllm_lite.errors import ConfigError
from vllm_lite.kernels import cpu
from vllm_lite.worker.device import KV_DTYPES, open_device, set_threads
from vllm_lite.worker.graphs import CudaCapture
from vllm_lite.worker.memory.profile import CudaMemory


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads(), cpu.num_threads() if cpu.available() else 1
    yield
    torch.set_num_threads(before[0])
    if cpu.available():
        cpu.set_num_threads(before[1])


def resolved(**settings: Any) -> ResolvedConfig:
    """A config of a machine that need not be this one."""
    config = EngineConfig(device="cpu").resolve(max_position_embeddings=8, dtype="float32", model_path="m")
    return msgspec.structs.replace(config, **settings)


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("native", [True, False])
def test_a_cpu_has_no_memory_to_profile_and_records_native_calls(
    eager: bool, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_lite.worker.device.cpu.available", lambda: native)
    device = open_device(resolved(device="cpu", enforce_eager=eager), 0)
    assert (device.torch.type, device.memory) == ("cpu", None)
    assert (device.capture is None) == (eager or not native)
    assert device.torch.type == "cpu"


def see_devices(count: int, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Make torch report this number of GPUs. Returns the list of devices that the code makes current."""
    made: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", made.append)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    return made


def test_no_gpu_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    see_devices(0, monkeypatch)
    with pytest.raises(ConfigError, match="sees no CUDA device; give --device cpu"):
        open_device(resolved(device="cuda"), 0)


@pytest.mark.parametrize("rank", [0, 2])
def test_too_few_gpus_are_refused_alike_by_every_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = see_devices(2, monkeypatch)
    with pytest.raises(ConfigError, match=r"size is 3, but torch sees 2 CUDA devices.*--tensor-parallel-backend gloo"):
        open_device(resolved(device="cuda", tensor_parallel_size=3), rank)
    assert made == []


@pytest.mark.parametrize(("backend", "count", "indices"), [("auto", 3, [0, 1, 2]), ("gloo", 2, [0, 1, 0])])
def test_ranks_take_the_visible_gpus_in_order(
    backend: Any, count: int, indices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = see_devices(count, monkeypatch)
    config = resolved(device="cuda", tensor_parallel_size=3, tensor_parallel_backend=backend)
    opened = [open_device(config, rank).torch for rank in range(3)]
    assert opened == made == [torch.device("cuda", index) for index in indices]


def test_engines_of_one_machine_share_out_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    made = see_devices(4, monkeypatch)
    config = resolved(device="cuda", tensor_parallel_size=2, data_parallel_size=2)
    for engine in range(2):
        for rank in range(2):
            open_device(config.of_engine(engine), rank)
    assert made == [torch.device("cuda", index) for index in range(4)]
    see_devices(3, monkeypatch)
    with pytest.raises(ConfigError, match="data_parallel_size is 2 and tensor_parallel_size is 2, but torch sees 3"):
        open_device(config, 0)


def test_workers_of_one_process_do_not_share_out_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels, and how much shared memory they may have, belong to one device of a process."""
    made = see_devices(2, monkeypatch)
    for backend in ("auto", "gloo"):
        config = resolved(device="cuda", tensor_parallel_size=2, tensor_parallel_backend=backend, single_process=True)
        with pytest.raises(ConfigError, match=r"single_process has 2 workers .* torch sees 2; .*no --single-process"):
            open_device(config, 0)
    assert made == []
    open_device(resolved(device="cuda", single_process=True), 0)
    see_devices(1, monkeypatch)
    config = resolved(device="cuda", tensor_parallel_size=2, tensor_parallel_backend="gloo", single_process=True)
    assert open_device(config, 1).torch == torch.device("cuda", 0)


@pytest.mark.parametrize("eager", [False, True])
def test_a_gpu_has_both_unless_graphs_are_off(eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = see_devices(2, monkeypatch)
    device = open_device(resolved(device="cuda", enforce_eager=eager), 1)
    assert made == [torch.device("cuda", 1)] == [device.torch]
    assert isinstance(device.memory, CudaMemory)
    assert isinstance(device.capture, CudaCapture) is not eager


def test_memory_is_read_from_driver_and_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (30, 100))
    stats = {"allocated_bytes.all.current": 7, "allocated_bytes.all.peak": 9}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _device: stats)
    memory = CudaMemory(torch.device("cuda", 0))
    assert (memory.free_bytes(), memory.total_bytes()) == (30, 100)
    assert (memory.allocated_bytes(), memory.peak_bytes()) == (7, 9)


@pytest.mark.usefixtures("threads")
def test_threads_are_those_asked_for_in_torch_and_in_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert set_threads(3, num_cores=2) == 3
    assert torch.get_num_threads() == 3
    assert not cpu.available() or cpu.num_threads() == 3


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("binds", [True, False])
def test_threads_are_bound_unless_the_user_says_none(monkeypatch: pytest.MonkeyPatch, binds: bool) -> None:
    asked: list[tuple[int, bool]] = []
    monkeypatch.setattr(cpu, "set_num_threads", lambda count, binds: asked.append((count, binds)))
    set_threads(2, num_cores=2, binds=binds)
    assert asked == [(2, binds)] * cpu.available()


@pytest.mark.usefixtures("threads")
def test_threads_are_by_default_the_cores_unless_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert set_threads(None, num_cores=2) == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)  # as it does by itself when it starts
    assert set_threads(None, num_cores=2) == 1
    assert not cpu.available() or cpu.num_threads() == 1


def test_every_type_of_a_cache_is_known() -> None:
    for name, dtype in KV_DTYPES.items():
        assert EngineConfig.check({"kv_cache_dtype": name}).kv_cache_dtype == name
        assert dtype.is_floating_point or dtype == torch.int8
