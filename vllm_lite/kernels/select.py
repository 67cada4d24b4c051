"""Chooses the implementation of each operation for a device: its own kernels if it has some, else the reference in
torch. References and kernels do not import this module, so no lazy imports are needed.
"""

import torch

from vllm_lite.checkpoint.layer_specs.delta_net import DeltaNetSpec
from vllm_lite.checkpoint.layer_specs.mamba import MambaSpec
from vllm_lite.checkpoint.layer_specs.short_conv import ShortConvSpec
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.fused import CpuOps
from vllm_lite.kernels.cpu.recurrent import NativeDeltaNet, NativeMamba, NativeShortConv
from vllm_lite.kernels.cuda.cupy_launcher import default_launcher
from vllm_lite.kernels.cuda.fused import CudaOps
from vllm_lite.kernels.cuda.launcher import Launcher
from vllm_lite.kernels.cuda.recurrent import LaunchedConvolution, LaunchedDeltaNet, LaunchedMamba
from vllm_lite.kernels.delta_rule import DeltaNetOp
from vllm_lite.kernels.mamba import MambaOp
from vllm_lite.kernels.ops import Ops, TorchOps
from vllm_lite.kernels.short_conv import ConvolvedOp, ShortConvOp


def ops_for(device: torch.device) -> Ops:
    """Make the best implementation of the small operations for `device`."""
    if native_available(device):
        return CpuOps()
    if (launcher := launcher_of(device)) is not None:
        return CudaOps(launcher)
    return TorchOps()


def delta_net_op(spec: DeltaNetSpec, device: torch.device, dtype: torch.dtype) -> DeltaNetOp:
    """The fastest implementation that a device has."""
    if native_available(device) and NativeDeltaNet.supports(spec, dtype):
        return NativeDeltaNet(spec)
    if (launcher := launcher_of(device)) is not None and LaunchedDeltaNet.supports(spec, dtype):
        return LaunchedDeltaNet(spec, launcher)
    return DeltaNetOp(spec)


def mamba_op(spec: MambaSpec, device: torch.device, dtype: torch.dtype) -> MambaOp:
    """The fastest implementation that a device has."""
    if native_available(device) and NativeMamba.supports(spec, dtype):
        return NativeMamba(spec)
    if (launcher := launcher_of(device)) is not None and LaunchedMamba.supports(spec, dtype):
        return LaunchedMamba(spec, launcher)
    return MambaOp(spec)


def short_conv_op(spec: ShortConvSpec, device: torch.device, dtype: torch.dtype) -> ShortConvOp:
    """The fastest implementation that a device has."""
    if native_available(device) and NativeShortConv.supports(dtype):
        return NativeShortConv(spec)
    if (launcher := launcher_of(device)) is not None and LaunchedConvolution.supports(spec.conv_size):
        return ConvolvedOp(spec, LaunchedConvolution(launcher))
    return ShortConvOp(spec)


def is_graph_safe(
    spec: DeltaNetSpec | MambaSpec | ShortConvSpec | None, device: torch.device, dtype: torch.dtype
) -> bool:
    """Whether a graph can record such a layer on `device`. None is a layer with attention, for which this returns
    True."""
    match spec:
        case DeltaNetSpec():
            return delta_net_op(spec, device, dtype).graph_safe
        case MambaSpec():
            return mamba_op(spec, device, dtype).graph_safe
        case ShortConvSpec():
            return short_conv_op(spec, device, dtype).graph_safe
    return True


def native_available(device: torch.device) -> bool:
    """Whether native CPU kernels can be used for `device`."""
    return device.type == "cpu" and cpu.available()


def launcher_of(device: torch.device) -> Launcher | None:
    """Return the launcher of kernels on a GPU; None for other devices, and if kernels cannot be compiled."""
    return default_launcher() if device.type == "cuda" else None
