"""Tools that a user runs around the engine: command line, benchmarks, chat, plan, doctor. Nothing imports them."""
