"""What a user's process runs: text in, text out, over one connection to an engine. No torch, no transformers.

outputs.py        what a user gets
prompt.py         what a user may give, checked
sample.py         what arrives: samples, the cursor of a reader, logprobs of the prompt
sampling.py       sampling params: defaults of a checkpoint, the form on the wire
stream.py         one request: events in, RequestOutput out
beam.py           beam search under vLLM's names
chat.py           messages to prompts, and the tokenizer that scripts get
session.py        one connection and the thread that owns it
async_client.py   AsyncClient: streams, for asyncio
llm.py            LLM: lists in, lists out, owns its engine
progress.py       its progress bar
launch.py         starts an engine and waits until it is ready
instances.py      records of what this user runs, for ps and kill
"""
