"""HTTP requests that generate: each is a call, with one stream of the engine for each of its prompts.

style.py       the format of a call's answer
call.py        one call: its streams, its choices, and its reading by a client
list_call.py   a call about many texts that are answered together: vectors, scores, decisions
registry.py    all calls of this server, and the limits on new ones
dispatcher.py  delivers the engine's events to the calls
response.py    runs a call and writes its answer, streamed or whole
resumable.py   keeps calls whose streams outlive their connections
place.py       the position of a client in a stream
marked.py      writes a stream with positions as the ids of its events
"""
