"""GET /v1/live: the state of the engines, twice a second, for the page and `vllm-lite top`; and /debug/prefix.

snapshot.py  an engine's requests, blocks and counts as JSON, and their changes
feed.py      polls the engines while there are watchers, and sends each watcher its updates
routes.py    the routes
prefix.py    the cached blocks of a prompt, and why not all are
settings.py  the server's flags and the settings of its computation
"""
