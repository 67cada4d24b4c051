"""Reduction and exchange among the ranks of a model: shared memory, NCCL, gloo, or nothing at all"""
