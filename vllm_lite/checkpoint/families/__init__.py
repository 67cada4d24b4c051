"""Readers that make a ModelSpec of the config.json of each family. `config_json` chooses the module."""
