"""What a user's process runs: text in, text out, over one connection to an engine. No torch, no transformers.

tokenizer.py      text -> token ids -> text, over the `tokenizers` library
chat_template.py  messages -> text, by the checkpoint's template in a sandbox
template_source.py   where a template lies
template_process.py  the same in a process that the kernel bounds, for servers
detokenizer.py    token ids one at a time -> text, exactly the same text; stop strings
outputs.py        what a user gets
prompt.py         what a user may give, checked
stop_strings.py   what of a text could still become a stop string
prompt_scores.py  logprobs of a prompt, as they come in
sample.py         one continuation of a prompt: tokens in, text and logprobs out
stream.py         one request: events in, RequestOutput out
beam.py           beam search under vLLM's names
chat.py           messages to prompts, and the tokenizer that scripts get
generation.py     sampling parameters that a checkpoint recommends
session.py        one connection and the thread that owns it
async_client.py   AsyncClient: streams, for asyncio
llm.py            LLM: lists in, lists out, owns its engine
progress.py       its progress bar
launch.py         starts an engine and waits until it is ready
instances.py      records of what this user runs, for ps and kill
"""
