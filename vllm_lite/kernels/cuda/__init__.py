"""CUDA kernels: typed functions that check shapes, choose a template instantiation of csrc/cuda and launch it.

Every function takes a `Launcher` first. With `CupyLauncher` it runs on a GPU, on torch's current stream; the tests have
a launcher that runs the same source on the CPU. No module of this folder imports cupy before a `CupyLauncher` is made.
"""
