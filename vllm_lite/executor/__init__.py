"""Execution of the engine's steps: the Executor interface, worker processes, Ray, and a simulation."""
