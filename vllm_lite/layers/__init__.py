"""The parts of a model. Every layer writes into tensors that it is given: a step is a fixed program of operations."""
