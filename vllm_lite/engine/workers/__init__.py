"""Worker groups: how one is replaced when it dies, and which request may have killed it."""
