"""The OpenAI-compatible HTTP server: one more client of an engine. No torch.

app.py            the routes
live_requests.py  those about requests that run: how one is, its end, its branches; and what changes the server
metrics.py        /metrics, for Prometheus
config.py         what can be set: an engine's settings and the server's own
"""
