"""JSON schemas made ready for llguidance: keywords, bounds, names, formats and patterns that it takes."""
