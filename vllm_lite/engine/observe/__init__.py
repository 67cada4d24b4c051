"""Views of the engine: counters, recorded decisions, their replay, the state of one request."""
