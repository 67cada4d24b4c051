"""Typed functions that call the kernels of csrc/cpu, one module for each family. Each kernel has a reference in plain
torch."""

from vllm_lite.kernels.cpu.library import available, isa, num_threads, set_num_threads

__all__ = ["available", "isa", "num_threads", "set_num_threads"]
