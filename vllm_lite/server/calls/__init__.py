"""HTTP requests that generate: each is a call, with one stream of the engine for each of its prompts.

style.py       how a call's answer is written
call.py        one call: its streams, its choices, and its reading by a client
list_call.py   a call about many texts that are answered together: vectors, scores, decisions
registry.py    all calls of this server, and whether another one may start
dispatcher.py  brings what the engine sends to the calls
response.py    runs a call and writes its answer, streamed or whole
resumable.py   keeps calls whose streams outlive their connections
place.py       how much of a stream has been shown
marked.py      writes a stream with places as the ids of its events
restored.py    the stream of a request that another server started
"""
