"""`vllm-lite simulate`: runs the real scheduler under a load, on a virtual clock, with times of steps fitted to a
recording."""
