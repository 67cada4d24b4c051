"""`vllm-lite simulate`: the real scheduler under a load, on a virtual clock, with the times of steps that a recording
has shown."""
