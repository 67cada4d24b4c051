"""Worker groups: replacing a group that has died, and finding the request that may have killed it."""
