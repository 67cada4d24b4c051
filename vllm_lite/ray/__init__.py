"""Replicas on Ray Serve: engines on the machines of a cluster, behind the same HTTP application as `serve`'s.

    HTTP proxy (Ray's) -> HttpReplica: the application, tokenizer, streams -> EngineReplica: an engine and its workers

app.py       build_app(): the two deployments and their options, for `serve run`
config.py    RayServeConfig: an engine's settings, the HTTP server's, and replicas; how many there should be
http.py      HttpReplica: the HTTP application in a replica of its own, which holds the streams; its way to the engine's
session.py   ServeSession: the application's session; a stream whose replica dies goes on in another
engine.py    EngineReplica: an engine with its own workers, its health, what its cache holds
catch_up.py  what a replica that starts later takes over of the others: adapters, weights, a sleep or a pause
broadcast.py  calls all replicas at once, and has what answers in time
messages.py  what the two kinds of replica tell each other
router.py    PrefixRequestRouter: Serve's interface to the policy
places.py    that policy: -dp's PrefixRouter, with what replicas report
reported_blocks.py  what they report: the blocks of an engine's prefix cache, from its KV events
orphan.py    ends a replica whose node Ray has lost
deploy.py    puts the application on a cluster, for `vllm-lite ray-serve`
"""

from typing import Any


def build_app(args: dict[str, str]) -> Any:
    """Make the application for `serve run vllm_lite.ray:build_app model=... replicas=2`. Raises ConfigError."""
    from vllm_lite.ray.app import build  # ray is imported by those who have it

    return build(args)
