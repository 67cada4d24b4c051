"""One request's stream of results: its parameters on their way, events from the engine in, outputs out.

sampling.py      sampling params in the wire's form
open_stream.py   a request that has not ended, as its session knows it, and all such requests of a session
stream.py        a request as its user sees it
sample.py        one sample's tokens and text, and a reader's cursor over it
"""
