"""GGUF files: what their headers say, as the config.json and the tensors that families of models know. No torch."""
