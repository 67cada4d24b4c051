"""Preparation of JSON schemas for llguidance: keywords, bounds, names, formats and patterns."""
