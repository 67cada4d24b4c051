"""Guards of routes: limits of connections and bodies, API keys, clients that disconnect.

application.py  routes as an application, behind the guards
connection.py  limits of headers and of clients that do not read
framing.py     offers of other protocols, clients of HTTP/1.0
callers.py     names that the server answers to, web pages, proxies
auth.py        API keys, request ids
body.py        reads and decodes a body, within limits, also one that is not in UTF-8
weight.py      memory that a body takes, from its bytes as they come
long_work.py   goes through long bodies beside the loop, one at a time
unpack.py      packed bodies
paths.py       paths as clients write them
dialects.py    in which form errors are answered
disconnect.py  notices that a client has disconnected, and ends what is done for it
"""
