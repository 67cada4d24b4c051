"""Scheduling: decides what each step computes, from the waiting queue to the tokens that a step returned."""
