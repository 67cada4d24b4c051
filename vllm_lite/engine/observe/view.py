"""Makes a view of the engine's state for viewers.

Like describe() it changes no state, so traces need not record it.
"""

from array import array
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice, zip_longest
from typing import Any

from vllm_lite.engine.blocks.disk_tier import DiskTier
from vllm_lite.engine.blocks.host_tier import HostTier
from vllm_lite.engine.blocks.kv_blocks import KVBlocks
from vllm_lite.engine.blocks.manager import KVCacheManager
from vllm_lite.engine.blocks.pool import NULL_BLOCK, BlockPool
from vllm_lite.engine.blocks.swapping import num_held
from vllm_lite.engine.observe.describe import waiting_reason
from vllm_lite.engine.request import Request
from vllm_lite.engine.scheduling.in_flight import StepInFlight
from vllm_lite.engine.scheduling.scheduler import Scheduler
from vllm_lite.engine.sequence import Sequence, Status
from vllm_lite.protocol.step import BlockOp
from vllm_lite.protocol.view import (
    IS_CACHED,
    MAX_REFERENCES,
    MAX_ROWS,
    MAX_SEEN,
    MAX_TABLE,
    BlockContent,
    EngineView,
    RequestRow,
    StepWork,
)


def view(scheduler: Scheduler, first_block: int, now_s: float) -> EngineView:
    """The engine as it is now, with the blocks from `first_block` on."""
    kv, in_flight = scheduler.kv, scheduler.in_flight
    newest = in_flight.newest if in_flight else None
    shown = islice(_shown(scheduler), MAX_ROWS)
    return EngineView(
        step=scheduler.step,
        step_tokens=scheduler.num_scheduled_tokens if newest else 0,
        step_prefill=newest.message.num_prefill_tokens if newest else 0,
        step_samples=len(newest.sampling) if newest else 0,
        num_requests=len(scheduler.requests),
        rows=[_row(scheduler, sequence, place, now_s) for sequence, place in shown],
        num_blocks=kv.pool.num_blocks,
        block_size=kv.block_size,
        first_block=first_block,
        blocks=block_bytes(kv, first_block, MAX_SEEN),
        work=_work(newest, scheduler.meter.latest_drafts),
        conversations=tuple(scheduler.meter.conversations.rows(now_s)),
        num_host_blocks=0 if (host := host_tier(kv)) is None else host.num_usable,
    )


def _work(step: StepInFlight | None, drafts: tuple[int, int]) -> StepWork:
    """Drafts and block moves of the newest step in flight, and (drafted, accepted) of the latest one with a result."""
    if step is None:
        return StepWork(num_drafted=drafts[0], num_right=drafts[1])
    moved = Counter(op for op, _, _ in step.output.block_ops)
    moves = moved[BlockOp.COPY], moved[BlockOp.SWAP_OUT], moved[BlockOp.SWAP_IN]
    return StepWork(sum(most for _, most in step.drafted), *moves, *drafts)


def host_tier(kv: KVCacheManager) -> HostTier | None:
    """The host tier, if there is one."""
    blocks = kv.optional_part(KVBlocks)
    return blocks.host if blocks is not None and isinstance(blocks.host, HostTier) else None


def block_content(scheduler: Scheduler, block_id: int) -> BlockContent:
    """A block of the device or the host, and the tiers in which a prompt finds what it holds."""
    kv, host = scheduler.kv, host_tier(scheduler.kv)
    pool, place = kv.pool, block_id
    if host is not None and block_id >= host.first_id:
        pool, place = host.pool, block_id - host.first_id
    if place >= pool.num_blocks:
        return BlockContent(block_id)
    block = pool.blocks[place]
    if (key := block.block_hash) is None:
        return BlockContent(block_id, block.ref_count)
    disk = kv.optional_part(DiskTier)
    found = {
        "device": kv.pool.get_cached_block(key) is not None,
        "host": host is not None and host.find(key) is not None,
        "disk": disk is not None and key in disk.index,
    }
    tiers: Any = tuple(tier for tier, is_there in found.items() if is_there)
    return BlockContent(block_id, block.ref_count, key[:-1], key[-1], tiers)


def block_bytes(kv: KVCacheManager, first: int, most: int) -> bytes:
    """A byte for each of up to `most` blocks of the device and then of the host: its references, and whether a prefix
    hit can find it."""
    found, host = _bytes_of(kv.pool, first, most), host_tier(kv)
    if host is not None and (left := most - len(found)) > 0:
        found += _bytes_of(host.pool, max(0, first - host.first_id), left)
    return found


def _bytes_of(pool: BlockPool, first: int, most: int) -> bytes:
    blocks = pool.blocks[first : first + most]
    counts = [block.ref_count for block in blocks]
    if max(counts, default=0) > MAX_REFERENCES:
        counts = [min(count, MAX_REFERENCES) for count in counts]
    pairs = zip(counts, blocks, strict=True)
    return bytes([count if block.block_hash is None else count | IS_CACHED for count, block in pairs])


def _shown(scheduler: Scheduler) -> Iterator[tuple[Sequence, int | None]]:
    """A sequence of each live request, and its place in the queue: of those that run first, and then of those that
    wait."""
    seen = set[Request]()
    for sequence in scheduler.running:
        if sequence.request not in seen:
            seen.add(sequence.request)
            yield sequence, None
    for place, sequence in enumerate(chain(scheduler.waiting, scheduler.queues.held)):
        if sequence.request not in seen:
            seen.add(sequence.request)
            yield sequence, place


def _row(scheduler: Scheduler, sequence: Sequence, place: int | None, now_s: float) -> RequestRow:
    request = sequence.request
    host = sequence.host_ids or ()
    return RequestRow(
        request_id=request.request_id,
        external_id=request.external_id,
        status=sequence.status.value,  # type: ignore[arg-type]  # a live one is not finished
        reason=None if sequence.status is Status.RUNNING else waiting_reason(scheduler, sequence, place or 0),
        place=place,
        num_samples=request.num_samples,
        num_prompt=request.num_prompt,
        num_cached=request.num_cached_at_start or 0,
        num_computed=sequence.num_surely_computed,
        num_output=request.num_generated + sum(each.num_output for each in request.sequences),
        num_preemptions=request.num_preemptions,
        age_s=now_s - request.queued_s,
        num_blocks=num_held(sequence),
        num_host_blocks=sum(len(ids) - ids.count(NULL_BLOCK) for ids in host),
        table=array("I", _table(sequence)).tobytes(),
    )


def _table(sequence: Sequence) -> list[int]:
    """The physical blocks of the first group in their order; of one that was moved to the host, its place there."""
    ids = sequence.tables[0].ids[:MAX_TABLE] if sequence.tables else []
    if not sequence.host_ids:
        return ids
    there = sequence.host_ids[0][:MAX_TABLE]
    return [own or other for own, other in zip_longest(ids, there, fillvalue=NULL_BLOCK)]
