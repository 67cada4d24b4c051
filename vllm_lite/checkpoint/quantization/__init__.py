"""Readers of a checkpoint's quantization_config, one module per method, which make a QuantizationSpec. No torch."""
