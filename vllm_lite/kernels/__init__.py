"""Native kernels behind typed functions. A leaf: it knows tensors and shapes, never models or requests."""
