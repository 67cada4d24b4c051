"""`vllm-lite bench`: measures this machine through the product's own processes, and any server under load.

serve.py                  a server under load over HTTP, ours or another
serve_datasets.py         the requests of that load
serve_http.py             HTTP/1.1 and event streams that cost next to nothing
serve_client.py           one request, and the times of its answer
serve_result.py           vLLM's figures under vLLM's names
serve_plot.py             a picture of them
latency.py                one batch, from its prompts to its last tokens
throughput.py             many requests at once against one at a time
transformers_generate.py  the same by transformers, to compare with
models.py                 larger models with random weights, and LoRA adapters
"""
