"""Drafters with a model: how one is loaded beside the model whose tokens it drafts, and run over its own drafts."""
