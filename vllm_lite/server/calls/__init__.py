"""HTTP requests that generate: each is a call, with one stream of the engine for each of its prompts.

call.py        one call: its streams and its choices
registry.py    all calls of this server, and whether another one may start
dispatcher.py  brings what the engine sends to the calls
response.py    runs a call and writes its answer, streamed or whole
"""
