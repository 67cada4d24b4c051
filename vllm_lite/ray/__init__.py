"""Replicas on Ray Serve: engines on the machines of a cluster, behind the same HTTP application as `serve`'s.

    HTTP proxy (Ray's) -> HttpReplica: the application, tokenizer, streams -> EngineReplica: an engine and its workers

app.py       build_app(): the two deployments and their options, for `serve run`
config.py    RayServeConfig: an engine's settings, the HTTP server's, and the replicas'; the autoscaling policy
http.py      HttpReplica: the HTTP application in a replica of its own, which holds the streams and calls the engines
session.py   ServeSession: the application's session; a stream whose replica dies continues on another one
engine.py    EngineReplica: an engine with its own workers, its health, the blocks in its cache
catch_up.py  state that a replica started later copies from the others: adapters, weights, a sleep or a pause
broadcast.py  calls all replicas at once, and collects the answers that come in time
messages.py  messages between the two kinds of replica
router.py    PrefixRequestRouter: Serve's interface to the routing policy
places.py    the routing policy: -dp's PrefixRouter, with the replicas' reports
reported_blocks.py  these reports: the blocks of an engine's prefix cache, from its KV events
orphan.py    ends a replica whose node Ray has lost
deploy.py    runs the application on a cluster, for `vllm-lite ray-serve`
"""

from typing import Any


def build_app(args: dict[str, str]) -> Any:
    """Make the application for `serve run vllm_lite.ray:build_app model=... replicas=2`. Raises ConfigError."""
    from vllm_lite.ray.app import build  # ray is optional

    return build(args)
