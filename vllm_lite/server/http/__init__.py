"""Guards of routes: limits of connections and bodies, API keys, clients that disconnect.

application.py  the ASGI application: routes behind the guards
connection.py  limits on headers and on clients that do not read
framing.py     upgrade offers, clients of HTTP/1.0
callers.py     accepted host names, web pages, proxies
auth.py        API keys, request ids
body.py        reads and decodes bodies within limits, also in other encodings than UTF-8
weight.py      estimates the memory of a body while it arrives
long_work.py   processes long bodies in a thread, one at a time
unpack.py      compressed bodies
paths.py       normalizes paths
dialects.py    the format of errors, by path
disconnect.py  ends work for clients that have disconnected
"""
