"""EngineSnapshot: an engine's requests, blocks and counts as JSON, and their changes.

Counts have their names in Stats, from which /metrics takes them as well.
"""

from array import array
from base64 import b64encode
from collections.abc import Mapping
from typing import Any

from vllm_lite.protocol.api import Welcome
from vllm_lite.protocol.stats import Histogram, Stats
from vllm_lite.protocol.view import ConversationRow, EngineView, RequestRow
from vllm_lite.server.live_requests import WHY

MAX_SHOWN = 1 << 16
"""Maximum number of blocks shown per engine, one byte each, the device's first; further ones are only counted."""
COUNTS = (
    *("num_running", "num_waiting", "num_blocks", "num_used_blocks", "num_cached_blocks"),
    *("num_host_blocks", "num_used_host_blocks", "num_stored_keys", "num_writing_blocks"),
    *("steps", "prompt_tokens", "cached_tokens", "generated_tokens", "preemptions", "swaps"),
    *("host_hits", "loaded_tokens", "copied_blocks", "swapped_out_blocks", "swapped_in_blocks"),
    *("draft_tokens", "accepted_tokens", "life", "generation"),
)
TIMES = ("first_token_s", "token_gap_s", "queue_s")
Snapshot = dict[str, Any]
WITHOUT: Mapping[str, str | None] = {}


class EngineSnapshot:
    """One engine as its watchers see it, kept between polls, as each view covers only a part of the blocks."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.next_block = 0
        """First block of the next poll: views cover successive ranges of the blocks, and then start again."""
        self._blocks = bytearray()
        self._head: Snapshot = {}
        self._requests: dict[str, Snapshot] = {}

    def look(
        self, engine: Welcome, stats: Stats, view: EngineView, now_s: float, whys: Mapping[str, str | None] = WITHOUT
    ) -> Snapshot:
        """Apply the engine's answers, and return the changes since the last poll: the changed fields of each request,
        or None when it has ended. `whys` has sentences with numbers for some waiting requests."""
        before, requests = self._requests, {row.request_id: row_of(row, now_s) for row in view.rows}
        for key, why in whys.items():
            requests[key]["why"] = why
        for key in requests.keys() & before.keys():
            requests[key]["since"] = before[key]["since"]
        head = {
            "model": stats.model or engine.model,
            "state": state_of(stats),
            "max_model_len": engine.max_model_len,
            "block_size": view.block_size,
            "first_host_block": view.num_blocks,
            "disk_bytes": None if stats.disk is None else stats.disk.num_bytes,
            "num_requests": view.num_requests,
            "step": {
                "number": view.step,
                "tokens": view.step_tokens,
                "prefill": view.step_prefill,
                "sequences": view.step_samples,
                "drafts": view.work.num_drafts,
                "copies": view.work.num_copies,
                "swapped_out": view.work.num_swapped_out,
                "swapped_in": view.work.num_swapped_in,
                "drafted": view.work.num_drafted,
                "right": view.work.num_right,
            },
            "conversations": [conversation_of(row, now_s) for row in view.conversations],
            "counts": {name: getattr(stats, name) for name in COUNTS},
            "times": times_of(stats),
        }
        changes = {key: _changed(before.get(key, {}), row) for key, row in requests.items()}
        changed = {key: fields for key, fields in changes.items() if fields}
        gone = dict.fromkeys(before.keys() - requests.keys())
        self._requests, self._head = requests, head
        return {**head, "requests": {**gone, **changed}, "blocks": self._changed_blocks(view)}

    def whole(self) -> Snapshot:
        return {**self._head, "requests": self._requests, "blocks": blocks_of(0, self._blocks)}

    def _changed_blocks(self, view: EngineView) -> Snapshot | None:
        shown = min(view.num_blocks + view.num_host_blocks, MAX_SHOWN)
        if len(self._blocks) != shown:
            self._blocks = bytearray(shown)
        first = view.first_block
        new = view.blocks[: max(0, shown - first)]
        after = first + len(view.blocks)
        self.next_block = after if 0 < after < shown else 0
        if self._blocks[first : first + len(new)] == new:
            return None
        self._blocks[first : first + len(new)] = new
        return blocks_of(first, new)


def blocks_of(first: int, blocks: bytes | bytearray) -> Snapshot:
    """Encode the states of the blocks from `first` on, a byte each."""
    return {"first": first, "bytes": b64encode(blocks).decode()}


def _changed(before: Snapshot, now: Snapshot) -> Snapshot:
    return {field: value for field, value in now.items() if before.get(field, before) != value}


def row_of(row: RequestRow, now_s: float) -> Snapshot:
    """Describe a request, which arrived at `since`. Its table is that of its first KV group, by physical block; ids of
    host blocks follow those of the device."""
    return {
        "id": name_of(row),
        "state": row.status,
        "reason": row.reason,
        "why": None if row.reason is None else WHY.get(row.reason),
        "place": row.place,
        "samples": row.num_samples,
        "prompt": row.num_prompt,
        "cached": row.num_cached,
        "computed": row.num_computed,
        "output": row.num_output,
        "preemptions": row.num_preemptions,
        "since": round(now_s - row.age_s, 1),
        "blocks": row.num_blocks,
        "host_blocks": row.num_host_blocks,
        "table": array("I", row.table).tolist(),
    }


def conversation_of(row: ConversationRow, now_s: float) -> Snapshot:
    """Describe a conversation: requests that each continue the previous one, with the id of the latest, which arrived
    at `at`."""
    return {
        "number": row.number,
        "id": name_of(row),
        "requests": row.num_requests,
        "prompt": row.num_prompt,
        "cached": row.num_cached,
        "at": round(now_s - row.age_s, 1),
    }


def name_of(row: RequestRow | ConversationRow) -> str:
    """The id of a request, without the digest of its owner's key."""
    name = row.external_id or row.request_id
    return name.rpartition("~")[0] or name


def state_of(stats: Stats) -> str:
    """Describe the engine's state in a word or a sentence."""
    if stats.recovering:
        return f"recovering: {stats.recovering}"
    if stats.sleep_level is not None:
        return f"asleep (level {stats.sleep_level})"
    return "paused" if stats.is_paused else "serving"


def times_of(stats: Stats) -> dict[str, list[float]]:
    """The sum in seconds and the count of each measured time, so that two looks give the mean between them."""
    measured: dict[str, Histogram] = {name: getattr(stats.requests, name) for name in TIMES if stats.requests}
    return {name: [round(each.sum, 6), sum(each.counts)] for name, each in measured.items()}
