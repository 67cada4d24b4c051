"""HTTP requests that generate: their streams, the events that reach them, their answers."""
