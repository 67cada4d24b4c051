"""Routers of Ray Serve that ray_serve_check.py compares with ours: in turn, and Ray's own for prefixes."""

import itertools
from typing import Any

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica


class RoundRobin(FIFOMixin, RequestRouter):  # type: ignore[misc]
    def initialize_state(self, **_: Any) -> None:
        self._turns = itertools.count()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,  # noqa: ARG002
    ) -> list[list[RunningReplica]]:
        ordered = sorted(candidate_replicas, key=lambda each: each.replica_id.unique_id)
        return [[ordered[next(self._turns) % len(ordered)]]]


class RaysPrefixRouter(PrefixCacheAffinityRouter):  # type: ignore[misc]
    """Ray's own prefix router, which compares texts: each token is replaced by one character."""

    def _extract_text_from_request(self, pending_request: PendingRequest) -> str:
        # Imported here because Serve serializes the class with everything that it refers to.
        from vllm_lite.protocol.api import Generate
        from vllm_lite.protocol.codec import client_to_engine, unpack_tokens
        from vllm_lite.ray.messages import Routed

        routed = pending_request.args[0] if pending_request.args else None
        request = client_to_engine.decode(routed.payload) if isinstance(routed, Routed) else None
        return "".join(map(chr, unpack_tokens(request.prompt))) if isinstance(request, Generate) else "?"
