"""The OpenAI-compatible HTTP server: one more client of an engine. No torch.

config.py         what can be set: an engine's settings and the server's own
bodies.py         what a request may say, as structs; what is ignored, what is refused
errors.py         every answer that is an error, in OpenAI's shape
prompts.py        bodies to prompts: texts, token ids, messages through the chat template
relay.py          events of the engine's session, sorted to the calls of this loop
call.py           one call in flight: its streams, and what of them has been told
shapes.py         what is told, as a completion or as a chat: whole answers and pieces of streams
logprobs.py       log-probabilities in both of OpenAI's shapes
answer.py         a call as an HTTP response: whole or streamed, aborted when its client goes
gate.py           before any route: request ids, API keys
connection.py     limits on what a connection may send before there is a request
calls.py          all calls that run: who may start one, and what is done about clients that do not read
api.py            the routes
openapi.py        what the routes take, as a document
serve.py          `vllm-lite serve`: engine, workers and HTTP in one command
private.py        the same as a child that ends with the process which started it
"""
