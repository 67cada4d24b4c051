"""Scheduling: what each step computes, from the queue in which a request waits to the tokens that a step gave it."""
