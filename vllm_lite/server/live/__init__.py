"""GET /v1/live: the engines as they are, twice a second, for who watches them: the page, and `vllm-lite top`.

snapshot.py  an engine's requests, blocks and counts as JSON, and what of them has changed
feed.py      asks the engines as long as somebody watches; each watcher gets what it has missed
routes.py    the routes
settings.py  with which flags a server was started, and how it computes
"""
