"""Places: choice of a replica for a request, in Ray Serve's terms. A pure policy; PrefixRouter of
client/engines/routing.py decides.

A router knows what each replica has in its prefix cache from two sources: what it has sent there itself, and what the
replica reports now and then, which other routers may have sent.
"""

from collections.abc import Mapping

from vllm_lite.client.engines.routing import PrefixRouter
from vllm_lite.ray.messages import Route, Summary

UNKNOWN_BLOCKS = 4096
"""The size of a cache that has not been reported yet."""


class Places:
    """One router's knowledge of the replicas, by their names."""

    def __init__(self) -> None:
        self.router = PrefixRouter[str]()
        self._reports: dict[str, Summary | None] = {}
        self._sent: dict[str, set[bytes]] = {}
        """What each was sent since its last report but one: it may have been on its way when the last one was made."""
        self._sent_before: dict[str, set[bytes]] = {}

    def update(self, reports: Mapping[str, Summary | None]) -> None:
        """These replicas serve now, and these are their latest reports; others are forgotten."""
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
        """The replicas of `loads`, which has the number of requests of each, in the order in which they are tried."""
        chosen = self.router.choose(route.blocks, loads, route.affinity).engine
        return [chosen, *sorted((replica for replica in loads if replica != chosen), key=lambda each: loads[each])]

    def sent(self, replica: str, route: Route) -> None:
        """A request was sent to this replica, which will have its prompt in its cache."""
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
