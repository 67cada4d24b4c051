"""The library in a user's process: text in, text out, over one connection to an engine. No torch, no transformers.

llm.py                LLM: lists in, lists out; it owns its engine
llm_arguments.py      one prompt or several, and errors that say which
async_client.py       AsyncClient: streams, for asyncio
chat.py               messages to prompts, and the tokenizer object that scripts get
prompt.py             checks of a prompt and its sampling params, and its tokens
spans.py              spans of a prompt, text and media, and their flat form
pooling.py            vectors and scores: a request without samples
windows.py            long texts in windows, and their results as one
token_classes.py      entities of a text, from the numbers of its tokens
tag_paths.py          the likeliest path through the tags of spans
generation_config.py  sampling defaults of a checkpoint and of its user
outputs.py            results under vLLM's names
beam.py               beam search under vLLM's names
lora.py               LoRARequest: the adapter that a request names
progress.py           the progress bar of LLM.generate
"""
