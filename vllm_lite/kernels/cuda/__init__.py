"""CUDA kernels: typed functions that check shapes, choose a template instantiation of csrc/cuda and launch it.

Every function takes a `Launcher` first. With `CupyLauncher` it runs on a GPU, on torch's current stream; tests have a
launcher that runs the same source on the CPU. cupy is imported only when a `CupyLauncher` is made.
"""
