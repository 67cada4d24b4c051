"""KV events: publish the blocks that this engine caches and drops, in vLLM's format.

A hash is stored when the first block with its content is cached on the device, and removed when the last one is gone: a
consumer that applies the events in order has the set of the pool's keys, as (hash, group). Consecutive blocks of one
sequence share an event. Fields are in the order of vLLM's structs; older consumers ignore later ones.

Host and disk tier use the same events with another medium. As in vLLM, these have hashes only, without tokens and
parent, which are unknown for blocks that other engines wrote. Consumers that ignore the medium would take them for
device blocks, so they are published only with the setting `tiers`.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec

from vllm_lite.engine.blocks.groups import KVGroup
from vllm_lite.engine.blocks.host_tier import HostTier
from vllm_lite.engine.blocks.kv_blocks import KVBlocks
from vllm_lite.engine.blocks.pool import BlockPool, PoolObserver
from vllm_lite.engine.blocks.tier_index import TierIndex
from vllm_lite.engine.sequence import Sequence
from vllm_lite.protocol.transfers import MEDIUM as MEDIUM_KEY
from vllm_lite.protocol.transfers import STATE
from vllm_lite.runtime.nested_settings import KVEventsConfig
from vllm_lite.transport.publisher import Publisher

MEDIUM = "GPU"
"""vLLM's name for the medium of device blocks, whatever the device is."""
HOST_MEDIUM, DISK_MEDIUM = "CPU", "DISK"
"""Media of blocks on the host, and in the files of --kv-cache-dir."""
REJOIN_S = 1.0
"""Seconds for which an engine that replaces another one holds its events back, so that consumers have found its socket:
the first event clears all blocks."""
BlockHash = bytes | int


class _Event(msgspec.Struct, array_like=True, tag=True):
    pass


class BlockStored(_Event):
    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = MEDIUM
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(_Event):
    block_hashes: list[BlockHash]
    medium: str | None = MEDIUM
    group_idx: int | None = None


class AllBlocksCleared(_Event):
    pass


class EventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = 0


class KVEvents(PoolObserver):
    """Collects the events of `blocks` until flush(), which passes them to `publish` as one batch."""

    def __init__(
        self,
        config: KVEventsConfig,
        blocks: KVBlocks,
        publish: Callable[[bytes], None],
        rank: int = 0,
        disk: TierIndex | None = None,
    ) -> None:
        """`rank` is the engine's data-parallel rank; `disk` is the index of its disk tier."""
        self._rank = rank
        self._config = config
        self._pool = blocks.pool
        self._publish = publish
        self._encode = msgspec.msgpack.Encoder().encode
        self._announced: set[bytes] = set()
        self._events: list[_Event] = []
        self._tail: tuple[BlockStored, bytes, int] | None = None
        """(event, last hash, group) of the event that the next block of the same sequence may join."""
        self._salts: dict[int, str] = {}
        """Index of an event -> its cache salt. Only the map format has it: vLLM's structs have no such field."""
        blocks.on_store = self.stored
        blocks.pool.observers.append(self)
        self._disk = disk if config.tiers else None
        if self._disk is not None:
            self._disk.on_change = partial(self._changed, DISK_MEDIUM)
        if config.tiers and isinstance(blocks.host, HostTier):
            blocks.host.on_cached = lambda key: self._changed(HOST_MEDIUM, (key,), ())
            blocks.host.pool.observers.append(_HostObserver(blocks.host.pool, partial(self._changed, HOST_MEDIUM, ())))

    # ---- events

    def stored(self, sequence: Sequence, group: KVGroup, index: int) -> None:
        block_hash = sequence.block_hashes[index]
        if block_hash + group.key in self._announced:
            return
        self._announced.add(block_hash + group.key)
        size = group.block_size
        tokens = sequence.tokens[index * size : (index + 1) * size].tolist()
        parent = sequence.block_hashes[index - 1] if index else None
        if self._tail is not None and self._tail[1:] == (parent, group.index):
            event = self._tail[0]
            event.block_hashes.append(self._wire(block_hash))
            event.token_ids += tokens
        else:
            adapter = sequence.request.adapter
            event = BlockStored(
                [self._wire(block_hash)],
                None if parent is None else self._wire(parent),
                tokens,
                size,
                lora_id=None if adapter is None else adapter.number,
                lora_name=None if adapter is None else adapter.name,
                group_idx=group.index,
                kv_cache_spec_kind="full_attention" if group.window is None else "sliding_window",
                kv_cache_spec_sliding_window=group.window,
            )
            if (salt := sequence.request.params.cache_salt) is not None:
                self._salts[len(self._events)] = salt
            self._events.append(event)
        self._tail = event, block_hash, group.index

    def evicted(self, block_id: int, block_hash: bytes) -> None:  # noqa: ARG002
        if block_hash not in self._announced or self._pool.get_cached_block(block_hash) is not None:
            return
        self._announced.remove(block_hash)
        self._tail = None
        wire, group = self._wire(block_hash[:-1]), block_hash[-1]
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and (last.medium, last.group_idx) == (MEDIUM, group):
            last.block_hashes.append(wire)
        else:
            self._events.append(BlockRemoved([wire], group_idx=group))

    def cleared(self) -> None:
        self._announced.clear()
        self._tail = None
        self._events.append(AllBlocksCleared())
        if self._disk:
            self._changed(DISK_MEDIUM, self._disk, ())

    def _changed(self, medium: str, added: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Add events for keys that a host or disk tier has gained and lost."""
        self._tail = None
        for group, hashes in self._by_group(added).items():
            self._events.append(BlockStored(hashes, None, [], 0, medium=medium, group_idx=group))
        for group, hashes in self._by_group(removed).items():
            last = self._events[-1] if self._events else None
            if isinstance(last, BlockRemoved) and (last.medium, last.group_idx) == (medium, group):
                last.block_hashes += hashes
            else:
                self._events.append(BlockRemoved(hashes, medium, group))

    def _by_group(self, keys: Iterable[bytes]) -> dict[int, list[BlockHash]]:
        """Block hashes by KV group; keys of recurrent states and of media are left out."""
        found: dict[int, list[BlockHash]] = {}
        for key in keys:
            if not key.endswith((STATE, MEDIUM_KEY)):
                found.setdefault(key[-1], []).append(self._wire(key[:-1]))
        return found

    # ---- publishing

    def flush(self, now_s: float) -> None:
        """Publish the events since the last call, if there are any. `now_s` is Unix time."""
        if self._events:
            events: list[Any] = self._events
            if self._config.event_format == "map":
                events = [self._as_map(place, event) for place, event in enumerate(events)]
            self._publish(self._encode(EventBatch(now_s, events, self._rank)))
            self._events, self._tail = [], None
            self._salts.clear()

    def _as_map(self, place: int, event: _Event) -> dict[str, Any]:
        salt = {"cache_salt": self._salts[place]} if place in self._salts else {}
        return {"type": type(event).__name__, **msgspec.structs.asdict(event), **salt}

    def _wire(self, block_hash: bytes) -> BlockHash:
        return block_hash if self._config.hash_format == "bytes" else int.from_bytes(block_hash[-8:], "big")


class _HostObserver(PoolObserver):
    """Calls `gone` with each key that leaves the host's cache. A reset needs no call: AllBlocksCleared covers it."""

    def __init__(self, pool: BlockPool, gone: Callable[[Iterable[bytes]], None]) -> None:
        self._pool = pool
        self._gone = gone

    def evicted(self, block_id: int, block_hash: bytes) -> None:  # noqa: ARG002
        if self._pool.get_cached_block(block_hash) is None:
            self._gone((block_hash,))


class KVEventStream:
    """Publishes the KV events of one engine, and owns the sockets."""

    def __init__(
        self,
        config: KVEventsConfig,
        blocks: KVBlocks,
        rank: int = 0,
        rejoins_s: float | None = None,
        disk: TierIndex | None = None,
    ) -> None:
        """`config` has an endpoint; `rejoins_s` is the Unix time of the start if this engine replaces another one.
        Raises EngineError if an endpoint cannot be bound."""
        self.publisher = Publisher(
            config.endpoint or "", config.replay_endpoint, config.topic, config.buffer_steps, config.hwm
        )
        self._events = KVEvents(config, blocks, self.publisher.publish, rank, disk)
        self._silent_until_s = 0.0
        if rejoins_s is not None:
            self._events.cleared()
            self._silent_until_s = rejoins_s + REJOIN_S
        self.pollables = self.publisher.pollables
        self.close = self.publisher.close

    @property
    def patience_ms(self) -> int | None:
        """Milliseconds until serve() has to be called again without a new event; None: never."""
        return self.publisher.patience_ms

    def serve(self, now_s: float) -> None:
        """Publish new events and answer consumers that missed some. The engine calls this once per pass of its loop."""
        if now_s >= self._silent_until_s:
            self._events.flush(now_s)
        self.publisher.serve()
