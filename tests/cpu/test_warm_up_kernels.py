"""A GPU's worker loads every kernel before the first request, so that no request waits for a compiler.

A launcher that launches nothing records the kernels.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.driver import Driver
from tests.families.all import VARIANTS
from vllm_lite.attention.cuda import CudaBackend
from vllm_lite.kernels import cpu, select
from vllm_lite.kernels.cuda.fused import CudaOps
from vllm_lite.kernels.cuda.recurrent import LaunchedDeltaNet, LaunchedMamba
from vllm_lite.layers.weights import onednn
from vllm_lite.worker import worker as worker_module
from vllm_lite.worker.device import Device
from vllm_lite.worker.sampling import masks

CPU = torch.device("cpu")


class Recorder:
    """Keeps the names of kernels."""

    multiprocessor_bytes = 228 * 1024

    def __init__(self) -> None:
        self.names: set[str] = set()

    def kernel(self, source: str, name: str) -> Callable[..., None]:
        del source
        self.names.add(name.partition("<")[0])
        return lambda *_: None


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setattr(cpu, "available", lambda: False)
    monkeypatch.setattr(onednn, "pack", lambda _: None)
    monkeypatch.setattr(select, "TorchOps", lambda: CudaOps(made))
    monkeypatch.setattr(worker_module, "select_backend", lambda shape, _: CudaBackend(shape, made))
    monkeypatch.setattr(masks, "launcher_for", lambda _: made)
    monkeypatch.setattr(
        "vllm_lite.layers.recurrence.delta_net.delta_net_op", lambda spec, *_: LaunchedDeltaNet(spec, made)
    )
    monkeypatch.setattr("vllm_lite.layers.recurrence.mamba.mamba_op", lambda spec, *_: LaunchedMamba(spec, made))
    return made


def loaded(folder: Path, recorder: Recorder, **settings: Any) -> set[str]:
    driver = Driver(folder, on=Device(CPU), dtype="bfloat16", **settings)
    recorder.names.clear()
    with torch.inference_mode():
        driver.worker.runner.load_kernels()
    return recorder.names


def test_kernels_of_masks_and_common_prefixes_are_loaded(tmp_path: Path, recorder: Recorder) -> None:
    """A grammar's first mask, and the first sequences that begin alike, come in the midst of serving."""
    folder = make_checkpoint(tmp_path / "model", head_dim=64, hidden_size=128, dtype="bfloat16")
    found = loaded(folder, recorder)
    assert {"rule_out", "cascade_attention", "decode_attention", "prefill_attention", "rms_norm"} <= found
    assert "cascade_attention" not in loaded(folder, recorder, disable_cascade_attn=True)


@pytest.mark.parametrize(("family", "kernel"), [("Qwen3NextForCausalLM", "delta_rule"), ("Mamba2ForCausalLM", "mamba")])
def test_recurrent_layers(family: str, kernel: str, tmp_path: Path, recorder: Recorder) -> None:
    variant = next(one for one in VARIANTS if family == one.model)
    folder = variant.make(tmp_path / "model")
    assert {kernel, f"{kernel}_chunks", "short_conv"} <= loaded(folder, recorder)
