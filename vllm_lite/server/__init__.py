"""The OpenAI-compatible HTTP server: one more client of an engine. No torch.

app.py            the routes
route_table.py    what every route asks for and answers, in one table
wiring.py         the application: everything behind the routes, wired together
generation.py     what a body asks for, as a call that may start
resumption.py     goes on with a stream whose connection broke
live_requests.py  routes about requests that run (state, abort, fork), and /load, /reset_prefix_cache
live/             /v1/live: the engines as they are, for who watches them
load_report.py    the load in headers of answers, for balancers
metrics.py        /metrics, for Prometheus
llama_cpp.py      /props and /slots, for web clients of llama.cpp
config.py         what can be set: an engine's settings and the server's own
"""
