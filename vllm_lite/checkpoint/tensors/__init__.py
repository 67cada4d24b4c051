"""The tensors of a checkpoint by their headers: names, storage, bytes, and the part of each rank. No torch."""
