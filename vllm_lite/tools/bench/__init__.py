"""`vllm-lite bench`: the figures of this machine, measured through the product's own processes; load for any server.

serve.py                  load for a server over HTTP, ours or another
serve_datasets.py         what it is asked
serve_http.py             HTTP/1.1 and event streams that cost next to nothing
serve_client.py           one request, and what was seen of its answer
serve_result.py           vLLM's figures under vLLM's names
serve_plot.py             a picture of them
latency.py                one batch, from its prompts to its last tokens
startup.py                from the command `serve` to its first token
throughput.py             many requests at once against one at a time
transformers_generate.py  the same by transformers, to compare with
models.py                 larger models with random weights
engine.py                 scheduler, messages and processes, without a model
simulated.py              the scheduler alone, workers simulated
stub_worker.py            a worker without a model
kernels.py                the native kernels against memory's speed and torch
kernels_attention.py      paged attention and cache writes
kernels_fused.py          small operations and the sampler
kernels_linear.py         linear layers
step.py                   where the time of a decode step goes
step_engine.py            the engine's process with a ledger
step_worker.py            the worker's
ledger.py                 functions wrapped from outside, to time them
"""
