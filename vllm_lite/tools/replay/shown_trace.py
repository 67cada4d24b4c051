"""ShownTrace: the data of the page. A thread replays the trace and adds moments; others read them."""

import threading
from array import array
from itertools import islice
from pathlib import Path
from typing import Any

from vllm_lite.engine.observe.describe import describe
from vllm_lite.engine.observe.replay import Replay
from vllm_lite.engine.observe.view import block_bytes, view
from vllm_lite.errors import VllmLiteError
from vllm_lite.protocol import PROTOCOL_VERSION
from vllm_lite.protocol.api import Welcome
from vllm_lite.protocol.view import EngineView
from vllm_lite.server.live.snapshot import MAX_SHOWN, EngineSnapshot, blocks_of
from vllm_lite.server.live_requests import why
from vllm_lite.tools.replay.moments import Moments
from vllm_lite.tools.replay.timeline import Timeline
from vllm_lite.tools.replay.walk import stats_of, walk
from vllm_lite.trace.reader import TraceReader
from vllm_lite.trace.segments import header_of, segment_paths
from vllm_lite.trace.story import story

MAX_MOMENTS = 1 << 20
MAX_BYTES = 2 << 30
"""A trace with more moments, or more bytes, is shown up to these limits."""
NUM_OVERVIEW = 600
MAX_SENTENCES = 500


class _Full(Exception):
    """The limits are reached."""


class _Closed(Exception):
    """The trace was closed."""


class ShownTrace:
    """A trace as moments: one after each step, and one at the end of each segment, counted from 1."""

    def __init__(self, path: str) -> None:
        """Raises ProtocolError if the file is not a trace."""
        self.path = path
        self.header = header_of(path)
        self.trouble = ""
        """The reason why not all of the trace is shown."""
        self._moments = Moments()
        self._timeline = Timeline()
        self._steps, self._lives, self._ends = array("L"), array("L"), bytearray()
        self._snapshot = EngineSnapshot(0)
        self._done = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._read, name="replay", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the trace. Returns False on timeout."""
        return self._done.wait(timeout_s)

    def close(self) -> None:
        """Stop replaying, and close the file of moments."""
        self._is_closed = True
        if self._thread.ident is not None:
            self._thread.join()
        self._moments.close()

    # ---- for readers

    def __len__(self) -> int:
        return len(self._moments)

    def told(self) -> dict[str, Any]:
        """Facts about the trace, as far as it has been read."""
        is_whole = self._done.is_set()  # read before the count, which may still grow
        count, header = len(self), self.header
        facts = {
            "written by": f"vllm_lite {header.engine_version}",
            "KV blocks": header.num_blocks - 1,
            "blocks on the host": header.num_host_blocks,
            "tokens of a block": header.block_size,
            "prefix cache": "on" if header.caching else "off",
            "policy": header.policy,
            "ranks": header.tensor_parallel_size,
            "disk": "yes" if header.has_disk else "no",
            "windows of attention": ", ".join("none" if each is None else str(each) for each in header.windows),
            **header.options,
        }
        return {
            "file": Path(self.path).name,
            "moments": count,
            "is_whole": is_whole,
            "trouble": self.trouble,
            "began": header.wall_s,
            "num_blocks": header.num_blocks - 1,
            "facts": facts,
            "overview": self._timeline.overview(NUM_OVERVIEW, count),
        }

    def moment(self, number: int) -> dict[str, Any]:
        """The engine at a moment, and the numbers before it. Raises IndexError if there is no such moment, or not
        yet."""
        index = number - 1
        state, blocks = self._moments.at(index)
        time_s = self._timeline.times_s[index]
        return {
            "moment": number,
            "time": round(time_s, 6),
            "after_s": round(time_s - self.header.wall_s, 6),
            "life": self._lives[index],
            "step": self._steps[index],
            "is_end": bool(self._ends[index]),
            "history": self._timeline.until(index),
            "engines": {"0": {**state, "blocks": blocks_of(0, blocks)}},
        }

    def story(self, request_id: str) -> list[str]:
        """A request's story, from its arrival to its end. Raises RequestError, ProtocolError."""
        lines = story(request_id, *map(TraceReader, segment_paths(self.path)))
        more = len(lines) - MAX_SENTENCES
        return lines if more <= 0 else [*lines[:MAX_SENTENCES], f"... and {more} sentences more (vllm-lite why)"]

    # ---- the thread

    def _read(self) -> None:
        try:
            self.trouble = walk(self.path, self._add, lambda replay: self._add(replay, is_end=True))
        except _Closed:
            pass
        except _Full:
            self.trouble = f"only the first {len(self):,} moments are shown: there is room for no more"
        except VllmLiteError as error:
            self.trouble = str(error)
        except Exception as error:
            self.trouble = f"the trace cannot be shown further: {error!r}"
        self._done.set()

    def _add(self, replay: Replay, *, is_end: bool = False) -> None:
        if self._is_closed:
            raise _Closed
        if len(self) >= MAX_MOMENTS or self._moments.num_bytes >= MAX_BYTES:
            raise _Full
        scheduler, header, time_s = replay.scheduler, replay.reader.header, replay.wall_s
        stats, clock_s = stats_of(replay), scheduler.meter.now_s
        if scheduler.in_flight.num_unsent:  # else its prompts would be counted with those of the steps before it
            scheduler.in_flight.send(clock_s)
        no_block = header.num_blocks + header.num_host_blocks  # stored separately
        seen = view(scheduler, no_block, clock_s)
        change = self._snapshot.look(self._welcome(replay), stats, seen, time_s, _whys(replay, seen))
        self._timeline.add(time_s, stats)
        self._steps.append(scheduler.step)
        self._lives.append(header.life)
        self._ends.append(is_end)
        self._moments.add(self._snapshot.whole, change, block_bytes(scheduler.kv, 0, MAX_SHOWN))

    def _welcome(self, replay: Replay) -> Welcome:
        """The engine's Welcome, as far as it is in a trace."""
        header, longest = replay.reader.header, replay.scheduler.max_len
        name = Path(self.path).name
        return Welcome(PROTOCOL_VERSION, 0, name, longest, 0, (), header.num_blocks, header.block_size)


def _whys(replay: Replay, seen: EngineView) -> dict[str, str | None]:
    """Sentences with numbers, for the first request that waits for blocks, by request id."""
    waiting = (row.request_id for row in seen.rows if row.reason == "waits_for_blocks")
    requests = [replay.scheduler.requests[key] for key in islice(waiting, 1)]
    states = describe(replay.scheduler, requests, replay.scheduler.meter.now_s) if requests else []
    return {state.request_id: why(state) for state in states}
