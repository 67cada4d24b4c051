"""Activations of MLPs, in a module without msgspec, for measuring CUDA kernels where it is missing."""

from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_oai", "xielu"]
"""Activations of gated MLPs; all but the last two also exist without a gate. "gelu" is the exact one, "relu2" squared
relu, "swiglu_oai" gpt-oss's: with the gate at most 7 and up between -7 and 7, (up + 1) * gate * sigmoid(1.702 * gate).
"xielu" has trained parameters, belongs to one MLP, and is ungated."""
