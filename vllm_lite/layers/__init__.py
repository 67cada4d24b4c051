"""The layers of models. Every layer writes into given tensors, so that a step is a fixed program of operations."""
