"""The activations of MLPs. They stand alone because CUDA kernels are also measured where msgspec is missing."""

from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
"""What `Ops.activate` can do; "gelu" is the exact one."""
