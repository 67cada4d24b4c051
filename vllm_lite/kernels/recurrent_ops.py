"""Which implementation each kind of recurrent layer gets, for those who do not make the layers."""

import torch

from vllm_lite.checkpoint.delta_net import DeltaNetSpec
from vllm_lite.checkpoint.mamba import MambaSpec
from vllm_lite.checkpoint.short_conv import ShortConvSpec
from vllm_lite.kernels.delta_rule import delta_net_op
from vllm_lite.kernels.mamba import mamba_op
from vllm_lite.kernels.short_conv import short_conv_op


def is_graph_safe(
    spec: DeltaNetSpec | MambaSpec | ShortConvSpec | None, device: torch.device, dtype: torch.dtype
) -> bool:
    """Whether a graph can hold such a layer on `device`; None is one with attention, of which nothing is said here."""
    match spec:
        case DeltaNetSpec():
            return delta_net_op(spec, device, dtype).graph_safe
        case MambaSpec():
            return mamba_op(spec, device, dtype).graph_safe
        case ShortConvSpec():
            return short_conv_op(spec, device, dtype).graph_safe
    return True
