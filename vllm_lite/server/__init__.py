"""The OpenAI-compatible HTTP server: one more client of an engine. No torch.

app.py            the handlers of OpenAI's routes, and the ASGI application
route_table.py    one table with the request and response types of every route
wiring.py         constructs the objects behind the routes
generation.py     makes calls of request bodies
resumption.py     continues a stream whose connection broke
live_requests.py  routes about running requests (state, abort, fork), and /load, /reset_prefix_cache
live/             /v1/live: the state of the engines, for watchers
load_report.py    the engine's load in response headers, for load balancers
metrics.py        /metrics, for Prometheus
request_spans.py  a span of OpenTelemetry for each request
span_export.py    sends spans by OpenTelemetry's SDK
collector.py      where spans are sent, and by which protocol
config.py         the settings: an engine's and the server's own
"""
