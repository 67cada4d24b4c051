"""The record of a packed weight, as csrc/cpu reads it. Does not import torch."""

import ctypes

from vllm_lite.kernels.cpu.library import int32, int64, pointer

QUANTIZED_TYPES = (int64, int64, int32, int64, pointer, pointer)
"""Argument types of vllm_lite_quantized_weight."""


class Record(ctypes.Structure):
    """The same record as `PackedWeight` in csrc/cpu/linear.h."""

    _fields_ = (
        ("data", pointer),
        ("bias", pointer),
        ("num_inputs", int64),
        ("num_outputs", int64),
        ("type", int32),
        ("group_size", int32),
        ("scale_type", int32),
        ("minima_type", int32),
        ("values", pointer),
        ("bytes", pointer),
        ("offset", int32),
        ("are_whole", int32),
        ("order", pointer),
        ("supers", pointer),
        ("exact_rows", int32),
        ("byte_rows", int32),
    )
