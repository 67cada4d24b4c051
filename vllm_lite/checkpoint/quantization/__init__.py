"""Readers that make a QuantizationSpec of a checkpoint's quantization_config: one module for each method. No torch."""
