"""Scoreboard: memory that the API servers of one engine share, in which each reports its signs of life, its load, and
its rejections."""

import mmap
import os
import time

REJECTIONS = ("max_num_queued_reqs", "max_num_queued_tokens")
"""Limits that can cause a rejection."""
_LOAD, _ALIVE_S, _REJECTED = 0, 1, 2
_NUM_FIELDS = _REJECTED + len(REJECTIONS)


class Scoreboard:
    """The scoreboard of `num_servers` servers, as mapped by server `number`. Each server writes only its own fields, so
    there is no lock; times are from the monotonic clock, which all processes share."""

    def __init__(self, num_servers: int = 1, number: int = 0, fd: int | None = None) -> None:
        """`fd` is the file descriptor of the first server's scoreboard; None creates it."""
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
        """Report the number of calls that this server runs."""
        self._fields[self.number * _NUM_FIELDS + _LOAD] = num_calls

    def report_alive(self) -> None:
        """Report a sign of life. Called periodically on the event loop, so that a hung loop stops reporting."""
        self._fields[self.number * _NUM_FIELDS + _ALIVE_S] = time.monotonic()

    def loads(self) -> list[int]:
        """Return the number of calls that each server runs; 0 for one that is starting."""
        return [int(load) for load in self._fields[_LOAD::_NUM_FIELDS]]

    def alive_s(self, number: int) -> float:
        """Return the time of a server's last sign of life, 0 if it has not started yet."""
        return self._fields[number * _NUM_FIELDS + _ALIVE_S]

    def count_rejection(self, limit: str) -> None:
        """Count a rejection by this server because of `limit`, one of REJECTIONS."""
        self._fields[self.number * _NUM_FIELDS + _REJECTED + REJECTIONS.index(limit)] += 1

    def rejections(self) -> dict[str, int]:
        """Return the number of rejections of all servers, by limit."""
        return {limit: int(sum(self._fields[_REJECTED + at :: _NUM_FIELDS])) for at, limit in enumerate(REJECTIONS)}

    def clear(self, number: int) -> None:
        """Reset load and signs of life of a server that has ended, or is about to start. Its rejections still count."""
        for field in (_LOAD, _ALIVE_S):
            self._fields[number * _NUM_FIELDS + field] = 0
