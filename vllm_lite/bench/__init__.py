"""`vllm-lite bench`: the figures of this machine, measured through the product's own processes."""
