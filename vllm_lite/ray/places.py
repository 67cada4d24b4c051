"""Places: choice of a replica for a request, in Ray Serve's terms. A pure policy, based on PrefixRouter of
client/engines/routing.py.

A router knows the contents of each replica's prefix cache from two sources: the requests it has sent there, and the
replica's periodic reports, which include other routers' requests.
"""

from collections.abc import Mapping

from vllm_lite.client.engines.routing import PrefixRouter
from vllm_lite.ray.messages import Route, Summary

UNKNOWN_BLOCKS = 4096
"""Assumed size of a cache before its first report."""


class Places:
    """A router's view of the replicas, by their names."""

    def __init__(self) -> None:
        self.router = PrefixRouter[str]()
        self._reports: dict[str, Summary | None] = {}
        self._sent: dict[str, set[bytes]] = {}
        """Blocks sent to each replica since its last report; `_sent_before`: since the one before, as they may have
        been on the way when the last report was made."""
        self._sent_before: dict[str, set[bytes]] = {}

    def update(self, reports: Mapping[str, Summary | None]) -> None:
        """Set the serving replicas and their latest reports; others are forgotten."""
        for gone in set(self._reports) - set(reports):
            self.router.remove(gone)
            for known in (self._reports, self._sent, self._sent_before):
                known.pop(gone, None)
        for replica, report in reports.items():
            if replica not in self._reports:
                self.router.add(replica, UNKNOWN_BLOCKS if report is None else report.num_blocks)
            if report is not None and report != self._reports.get(replica):
                self._take(replica, report)
            self._reports[replica] = report

    def order(self, route: Route, loads: Mapping[str, int]) -> list[str]:
        """The replicas of `loads` (number of requests by replica) in the order in which to try them."""
        chosen = self.router.choose(route.blocks, loads, route.affinity).engine
        return [chosen, *sorted((replica for replica in loads if replica != chosen), key=lambda each: loads[each])]

    def sent(self, replica: str, route: Route) -> None:
        """Record that a request was sent to this replica, which will have its prompt in its cache."""
        self.router.stored(replica, route.blocks)
        self._sent.setdefault(replica, set()).update(route.blocks)

    def _take(self, replica: str, report: Summary) -> None:
        self.router.add(replica, report.num_blocks)
        blocks = report.blocks()
        if report.is_complete:
            underway = self._sent.get(replica, set()) | self._sent_before.get(replica, set())
            self.router.retain(replica, underway.union(blocks))
        self.router.stored(replica, [block for block in blocks if not self.router.num_cached(replica, [block])])
        self._sent_before[replica] = self._sent.pop(replica, set())
