"""The persistent batch: what a worker keeps of its sequences, and the arrays that a step takes from it."""
