"""Collective communication among the ranks of a model: shared memory, NCCL, gloo, or a single rank"""
