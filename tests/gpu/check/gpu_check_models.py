"""Models of `gpu_check` with random weights: their configurations, and workers that run them without an engine."""

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_lite.attention.cuda import CudaBackend
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.config import EngineConfig
from vllm_lite.kernels import cpu, select
from vllm_lite.kernels.cuda.fused import CudaOps
from vllm_lite.layers.weights import gpu_matmul, onednn
from vllm_lite.protocol.control import Start
from vllm_lite.protocol.step import Entry, ModelOutput, SchedulerOutput
from vllm_lite.worker import model_runner
from vllm_lite.worker import worker as worker_module
from vllm_lite.worker.device import Device
from vllm_lite.worker.memory.profile import MemoryProfile, profile_memory
from vllm_lite.worker.progress import Progress
from vllm_lite.worker.worker import Worker

_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
_TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
MODELS: dict[str, dict[str, Any]] = {
    "8b": _8B,
    "1b": _8B | _1B | {"tie_word_embeddings": True},
    "tiny": _8B | _TINY | {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
}
GENERATION = 1
PATIENT_S = 120.0
"""heartbeat_timeout_s during checks: so long that compiling a kernel is not taken for a device that hangs."""


def write_model(name: str, folder: str) -> None:
    """Write the config.json of a model: a checkpoint for load_format "dummy"."""
    Path(folder, "config.json").write_text(json.dumps(MODELS[name]))


class HostMemory:
    """Replaces a device's memory when the script is tested without a GPU. Its sizes are constants."""

    def total_bytes(self) -> int:
        return 4 << 30

    def free_bytes(self) -> int:
        return 3 << 30

    def allocated_bytes(self) -> int:
        return 1 << 20

    peak_bytes = allocated_bytes

    def reset_peak(self) -> None:
        pass

    def trim(self) -> None:
        pass


def emulated_device() -> Device:
    """A CPU device whose workers in this process run the kernels of a GPU, with the emulator and a fake of CUDA's
    capture."""
    from tests.cuda_capture import CapturingLauncher, CudaLikeCapture
    from tests.kernels.emulator import EmulatorLauncher

    launch_with(CapturingLauncher(EmulatorLauncher()))
    return Device(torch.device("cpu"), HostMemory(), CudaLikeCapture())


def launch_with(launcher: Any) -> Callable[[], None]:
    """Make workers of this process that run on a CPU launch the kernels of a GPU through `launcher`. Returns a function
    that ends this."""
    replaced: dict[str, tuple[Any, Any]] = {
        "select_backend": (worker_module, lambda shape, _: CudaBackend(shape, launcher)),
        "TorchOps": (select, lambda: CudaOps(launcher)),
        "available": (cpu, lambda: False),
        "pack": (onednn, lambda _: None),
        "launcher_for": (gpu_matmul, lambda dtype, _: launcher if dtype in gpu_matmul.DTYPES else None),
    }
    before = {name: getattr(module, name) for name, (module, _) in replaced.items()}
    for name, (module, value) in replaced.items():
        setattr(module, name, value)

    def end() -> None:
        for name, (module, _) in replaced.items():
            setattr(module, name, before[name])

    return end


class RandomWorker:
    """A worker with a model of `MODELS` and all the memory that its profile promises, ready to run steps."""

    def __init__(self, name: str, device: Device | None, **settings: Any) -> None:
        """`device` is that of a test; None selects the GPU."""
        self.profile: MemoryProfile | None = None
        self.graph_bytes = 0
        self._keep_measurements()
        self._folder = tempfile.TemporaryDirectory()
        write_model(name, self._folder.name)
        wanted = {"model": self._folder.name, "device": "cuda" if device is None else "cpu", "load_format": "dummy"}
        config = EngineConfig.check(wanted | {"dtype": "bfloat16", "heartbeat_timeout_s": PATIENT_S} | settings)
        longest = load_spec(self._folder.name).max_position_embeddings
        self.config = config.resolve(max_position_embeddings=longest, dtype="bfloat16", model_path=self._folder.name)
        self.worker = Worker(self.config, 0, Progress(), device)
        self.ready = self.worker.load()
        if device is not None:  # load() does not measure a CPU's memory
            self.worker.determine_num_available_blocks(0, 1 << 20)
        self.worker.start(Start(GENERATION, self.ready.num_blocks, 0))
        self._number = 0

    def run(self, entries: Sequence[Entry]) -> ModelOutput:
        """Run one step, and return its tokens when they have been computed."""
        self._number += 1
        return self.worker.execute(SchedulerOutput(GENERATION, self._number, [], list(entries)))

    def run_together(self, steps: Sequence[Sequence[Entry]]) -> list[ModelOutput]:
        """Run several steps that are sent before the first one's tokens are known, like the engine's with
        async_scheduling."""
        made = []
        for entries in steps:
            self._number += 1
            made.append(SchedulerOutput(GENERATION, self._number, [], list(entries)))
        return self.worker.run(made)

    def close(self) -> None:
        self._folder.cleanup()

    def _keep_measurements(self) -> None:
        """Keep the memory profile and the memory of graphs, which the worker otherwise only logs."""
        capture_graphs = model_runner.ModelRunner.capture_graphs

        def measured(*args: Any) -> MemoryProfile:
            self.profile = profile_memory(*args)
            return self.profile

        def captured(runner: model_runner.ModelRunner, *args: Any) -> None:
            memory = self.worker.device.memory
            before = memory.free_bytes() if memory else 0
            capture_graphs(runner, *args)
            self.graph_bytes = before - (memory.free_bytes() if memory else 0)

        for owner, name, function in (
            (worker_module, "profile_memory", measured),
            (model_runner.ModelRunner, "capture_graphs", captured),
        ):
            setattr(owner, name, function)
