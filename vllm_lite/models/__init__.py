"""Model families, their registry, and the loader of their weights."""
