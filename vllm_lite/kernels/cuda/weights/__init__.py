"""Products with weights on a GPU: quantized ones that stay packed, and low-rank adapters."""
