"""Typed functions that call native kernels. They know tensors and shapes, never models or requests."""
