"""Readers of each family's config.json, which make a ModelSpec. `config_json` chooses the module."""
