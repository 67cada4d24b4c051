"""The library in a user's process: text in, text out, over one connection to an engine. No torch, no transformers.

What a user calls:
llm.py           LLM: lists in, lists out; it owns its engine
async_client.py  AsyncClient: streams, for asyncio
launch.py        starts an engine and waits until it is ready
launch_engines.py  the same for --data-parallel-size
supervisor.py    replaces it when it dies
engine_probe.py  the connection by which the supervisor watches it

The road of a request:
prompt.py        checks a prompt and its sampling params, tokenizes
chat.py          messages to prompts, and the tokenizer object that scripts get
sampling.py      sampling params: the seed, the form on the wire
generation_config.py  sampling defaults of a checkpoint and of its user
pooling.py       vectors and scores: a request without samples
stream.py        one request: events in, RequestOutput out
any_session.py   what the server uses of a session, whatever stands behind it
session.py       one connection to an engine, or to the next one, and the thread that owns it
asking.py        what a session asks an engine beside its requests
answers.py       who waits for the answers
known_adapters.py  which LoRA adapters requests may name
connection.py    the handshake, and the search for the engine that takes the place of one that died
open_stream.py   what a session knows of a request: enough to start it again
data_parallel.py  one session with several engines
routing.py       which of them gets a request: where its prefix is cached, within bounds of the load
cached_blocks.py  says to it what engines have cached, from their KV events
joined_answers.py  what several engines answer to one question
sample.py        what arrives: samples, a reader's cursor, the prompt's logprobs
outputs.py       what a user gets
lora.py          LoRARequest: the adapter that a request names

Beside it:
operations.py    pause, sleep and other weights: what is asked for, and the answer
beam.py          beam search under vLLM's names
progress.py      the progress bar of LLM.generate
instances.py     records of this user's engines, for ps and kill
"""
