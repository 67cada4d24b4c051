"""The persistent batch: the worker's arrays with one row per running sequence, and the inputs of each step."""
