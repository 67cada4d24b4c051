"""PrefixRequestRouter: Ray Serve's request router, one for each handle of the engine's deployment.

Places makes the decision; this class passes it the names and loads that Serve knows. If a replica is full, Serve tries
the next one.
"""

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from vllm_lite.ray.messages import Route, Routed, Summary
from vllm_lite.ray.places import Places


class PrefixRequestRouter(RequestRouter):  # type: ignore[misc]
    """The `request_router_class`; its path is "vllm_lite.ray.router:PrefixRequestRouter"."""

    def initialize_state(self, **_: Any) -> None:
        self._places = Places()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._places.update({_name(each): Summary.from_stats(each.routing_stats) for each in replicas})

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Groups of replicas. Serve takes the least loaded replica of the first group with room."""
        by_name = {_name(each): each for each in candidate_replicas}
        cache = self.replica_queue_len_cache
        loads = {name: cache.get(each.replica_id) or 0 for name, each in by_name.items()}
        names = self._places.order(_route(pending_request), loads)
        return [[by_name[names[0]]], [by_name[name] for name in names[1:]]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:  # noqa: ARG002
        self._places.sent(replica_id.unique_id, _route(pending_request))


def _name(replica: RunningReplica) -> str:
    return str(replica.replica_id.unique_id)


def _route(request: PendingRequest | None) -> Route:
    """The route of a request; empty for calls other than generate."""
    routed = request.args[0] if request is not None and request.args else None
    return routed.route if isinstance(routed, Routed) else Route()
