"""Drafters with a model: loading it beside the model whose tokens it drafts, and running it over its own drafts."""
