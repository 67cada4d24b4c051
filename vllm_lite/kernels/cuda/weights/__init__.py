"""Products with weights on a GPU: packed quantized weights, and low-rank adapters."""
