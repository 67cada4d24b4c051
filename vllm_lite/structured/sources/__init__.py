"""Sources of masks in a worker: compiled grammars that follow an output token by token."""
