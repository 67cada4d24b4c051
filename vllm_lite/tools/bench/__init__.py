"""`vllm-lite bench`: measures this machine with the product's own processes, and any server under load.

serve.py                  load on a server over HTTP, this package's or another
serve_datasets.py         the requests of that load
serve_http.py             a cheap client of HTTP/1.1 and event streams
serve_client.py           one request, and the times of its answer
serve_result.py           vLLM's metrics under vLLM's names
serve_plot.py             a figure of them
latency.py                one batch, from its prompts to its last tokens
throughput.py             many concurrent requests, and one at a time
transformers_generate.py  the same with transformers, for comparison
models.py                 larger models with random weights, and LoRA adapters
engine.py                 scheduler, messages and processes, without a model
stub_worker.py            a worker process without a model, which answers at once
"""
