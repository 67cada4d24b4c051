"""Tensors of a checkpoint by their headers: names, storage, bytes, and each rank's part. No torch."""
