"""The OpenAI-compatible HTTP server: one more client of an engine. No torch.

config.py         what can be set: an engine's settings and the server's own
bodies.py         what a request may say, as structs; what is ignored, what is refused
errors.py         every answer that is an error, in OpenAI's shape
reading.py        bodies: how much of them is read, for how long
prompts.py        bodies to prompts: texts, token ids, messages through the chat template
rendering.py      chats to texts, in a process that a template cannot hold for long
workers.py        threads for what would hold the loop, for as long as the client is there
relay.py          events of the engine's session, sorted to the calls of this loop
pace.py           how often streams are told of news when there are many
call.py           one call in flight: its streams, and what of them has been told
shapes.py         what is told, as a completion or as a chat: whole answers and pieces of streams
logprobs.py       log-probabilities in both of OpenAI's shapes
answer.py         a call as an HTTP response: whole or streamed, aborted when its client goes
gate.py           before any route: request ids, API keys
connection.py     limits on what a connection may send before there is a request
calls.py          all calls that run: who may start one, and what is done about clients that do not read
api.py            the routes
requests.py       those about requests that run: how one is, its end, its branches; and what changes the server
metrics.py        /metrics, for Prometheus
openapi.py        what the routes take, as a document
loaded.py         what is read of the model's folder while the engine starts
service.py        one process's HTTP server in front of a ready engine
serve.py          `vllm-lite serve`: engine, workers and HTTP in one command
front.py          what stands in front of its engine: this HTTP server, and others beside it
family.py         those others: started, started again, ended
process.py        the entry point of one of them
siblings.py       asking each other about a request that runs elsewhere
private.py        the same as a child that ends with the process which started it
"""
