"""Model families, the registry that finds them, and the loader that fills them."""
