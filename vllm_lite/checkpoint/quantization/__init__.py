"""How the quantization_config of a checkpoint becomes a QuantizationSpec: one module for each method. No torch."""
