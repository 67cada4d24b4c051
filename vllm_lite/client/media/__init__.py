"""Images on their way into a prompt: their sources, limits, and preprocessing in child processes. No torch."""
