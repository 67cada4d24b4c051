"""The activations of MLPs. They stand alone because CUDA kernels are also measured where msgspec is missing."""

from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_oai", "xielu"]
"""What gated MLPs do; all but the last two also without a gate. "gelu" is the exact one, "relu2" the square of relu,
"swiglu_oai" that of gpt-oss: with the gate at most 7 and up between -7 and 7, (up + 1) * gate * sigmoid(1.702 * gate).
"xielu" has weights, and is the MLP's own matter, which has no gate.
"""
