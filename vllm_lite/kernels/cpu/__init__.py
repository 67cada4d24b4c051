"""Kernels of csrc/cpu behind typed functions, one module for each family. Each has a plain torch twin as reference."""

from vllm_lite.kernels.cpu.library import available, isa, num_threads, set_num_threads

__all__ = ["available", "isa", "num_threads", "set_num_threads"]
