"""Scoreboard: memory that the API servers of one engine share. Each reports there that it is alive, its load, and what
it refused."""

import mmap
import os
import time

REJECTIONS = ("max_num_queued_reqs", "max_num_queued_tokens")
"""The limits for which a request may be refused."""
_LOAD, _ALIVE_S, _REJECTED = 0, 1, 2
_NUM_FIELDS = _REJECTED + len(REJECTIONS)


class Scoreboard:
    """As server `number` of `num_servers` sees it. Each server writes its own fields only, so there is no lock; times
    are the system's monotonic clock, which all processes share."""

    def __init__(self, num_servers: int = 1, number: int = 0, fd: int | None = None) -> None:
        """`fd` is that of the first server's scoreboard, which all others get; the first one makes it."""
        size = num_servers * _NUM_FIELDS * 8
        if fd is None:
            fd = -1 if num_servers == 1 else os.memfd_create("scoreboard")
            if fd >= 0:
                os.ftruncate(fd, size)
        self.fd = fd
        self.num_servers = num_servers
        self.number = number
        self._fields = memoryview(mmap.mmap(fd, size)).cast("d")

    def report_load(self, num_calls: int) -> None:
        """Report how many calls this server runs."""
        self._fields[self.number * _NUM_FIELDS + _LOAD] = num_calls

    def report_alive(self) -> None:
        """To be called again and again by what would stand still if this server hung."""
        self._fields[self.number * _NUM_FIELDS + _ALIVE_S] = time.monotonic()

    def loads(self) -> list[int]:
        """Return how many calls each server runs; 0 for one that is being started."""
        return [int(load) for load in self._fields[_LOAD::_NUM_FIELDS]]

    def alive_s(self, number: int) -> float:
        """Return when a server was last known to be alive, 0 if it has not started yet."""
        return self._fields[number * _NUM_FIELDS + _ALIVE_S]

    def count_rejection(self, limit: str) -> None:
        """This server has refused a request because of `limit`, one of REJECTIONS."""
        self._fields[self.number * _NUM_FIELDS + _REJECTED + REJECTIONS.index(limit)] += 1

    def rejections(self) -> dict[str, int]:
        """Return how many requests all servers have refused, by the limit."""
        return {limit: int(sum(self._fields[_REJECTED + at :: _NUM_FIELDS])) for at, limit in enumerate(REJECTIONS)}

    def clear(self, number: int) -> None:
        """Reset what a server that has ended, or is about to be started, said of itself. Its refusals still count."""
        for field in (_LOAD, _ALIVE_S):
            self._fields[number * _NUM_FIELDS + field] = 0
