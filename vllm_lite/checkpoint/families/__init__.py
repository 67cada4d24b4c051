"""How the config.json of each family of models becomes a ModelSpec. `config_json` chooses the module."""
