"""GGUF files: their headers as the config.json and the tensors that families read. No torch."""
