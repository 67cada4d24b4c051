"""Chat templates: their source, their rendering in a process of its own, and the messages they take."""
