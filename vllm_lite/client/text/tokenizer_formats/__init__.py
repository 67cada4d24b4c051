"""Tokenizers in other formats, converted once into a tokenizer.json."""
