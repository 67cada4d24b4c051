"""`vllm-lite bench`: measures this machine through the product's own processes, and any server under load.

serve.py                  a server under load over HTTP, ours or another
serve_datasets.py         the requests of that load
serve_http.py             HTTP/1.1 and event streams that cost next to nothing
serve_client.py           one request, and the times of its answer
serve_result.py           vLLM's figures under vLLM's names
serve_plot.py             a picture of them
latency.py                one batch, from its prompts to its last tokens
startup.py                from the command `serve` to its first token
adapters.py               LoRA adapters with random matrices
throughput.py             many requests at once against one at a time
transformers_generate.py  the same by transformers, to compare with
models.py                 larger models with random weights
engine.py                 scheduler, messages and processes, without a model
simulated.py              the engine core alone, with simulated workers and a virtual clock
stub_worker.py            a worker process without a model, which answers at once
kernels.py                the native kernels against memory's speed and torch
kernels_attention.py      paged attention and cache writes
kernels_experts.py        layers of experts
kernels_fused.py          small operations and the sampler
kernels_linear.py         linear layers
kernels_masks.py          bitmasks on logits
kernels_ranks.py          the all-reduce of two ranks
kernels_timing.py         how their times are taken, and the speed of memory
step.py                   where the time of a decode step goes
step_engine.py            the engine's process with a ledger
step_worker.py            the worker's
ledger.py                 wraps functions from outside and charges their time to parts of a step
"""
