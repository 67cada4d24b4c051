"""Contents that must not be found on disk any more: after a reset, a fault, lost workers, other files of an adapter."""

import pytest

from tests.disk_rig import PROMPT, DiskRig, loading, restarted
from tests.scheduler_rig import expected
from vllm_lite.engine.adapters import Adapter
from vllm_lite.engine.request import Request
from vllm_lite.protocol.api import Generate
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.params import SamplingParams

# ---- forgetting


def test_a_reset_leaves_the_disk_unless_it_is_asked_for() -> None:
    rig = DiskRig()
    rig.serve("a", PROMPT)
    rig.scheduler.reset_prefix_cache()
    assert rig.serve("b", PROMPT) == 28
    rig.scheduler.reset_prefix_cache(stored=True)
    rig.send()
    assert not rig.contents
    assert rig.serve("c", PROMPT) == 0


def test_blocks_loaded_during_a_reset_are_not_found() -> None:
    again = loading()
    again.scheduler.reset_prefix_cache(stored=True)
    again.drain()
    assert again.loads[0].keys[0] not in again.tier.index
    assert again.output("a") == expected(PROMPT, 5)
    assert again.scheduler.counters.cached_tokens == 0


@pytest.mark.parametrize("stored", [False, True])
def test_blocks_read_before_a_reset_are_not_published_after_it(stored: bool) -> None:
    again = loading()
    (load,) = again.loads
    again.scheduler.reset_prefix_cache(stored=stored)
    again.end(load)  # the worker had read it, and says so only now
    assert not any(again.kv.pool.get_cached_block(key) for key in load.keys)
    again.drain()
    assert again.output("a") == expected(PROMPT, 5)


@pytest.mark.parametrize("is_reset", [False, True])
def test_blocks_forgotten_while_being_written_are_never_found(is_reset: bool) -> None:
    rig = DiskRig(num_blocks=60)
    rig.holds = True
    request = rig.add("a", PROMPT, 20)
    while not rig.pending:
        rig.step()
    stores = list(rig.pending)
    keys = [key for store in stores for key in store.keys]
    if is_reset:
        rig.scheduler.reset_prefix_cache(stored=True)
    else:
        rig.scheduler.queues.end(request, "error", forget=True)
    for store in stores:
        rig.end(store)
    rig.scheduler.stored_keys(keys, [])  # the tier says as well that it has them
    assert not rig.tier.index
    rig.send()
    assert not rig.contents
    rig.scheduler.stored_keys([], keys)
    rig.drain()
    assert rig.serve("b", PROMPT) == 0
    assert rig.tier.index.issuperset(keys), "what is computed anew is kept again"


def test_a_write_that_failed_when_it_was_forgotten_is_made_again() -> None:
    rig = DiskRig(num_blocks=60)
    rig.holds = True
    request = rig.add("a", PROMPT, 20)
    while not rig.pending:
        rig.step()
    rig.fails = lambda _: True
    rig.scheduler.queues.end(request, "error", forget=True)
    rig.drain()
    rig.fails = lambda _: False
    rig.serve("b", PROMPT)
    assert len(rig.tier.index) == 8


def test_untrusted_blocks_are_also_forgotten_on_disk() -> None:
    rig = DiskRig(num_blocks=60)
    rig.add("a", PROMPT, 20)
    for _ in range(3):
        rig.step()
    assert rig.contents
    rig.holds = True
    request = rig.scheduler.requests["a"]
    rig.scheduler.queues.end(request, "error", forget=True)
    rig.drain()
    assert not rig.contents
    assert not rig.tier.index


def test_lost_workers_lose_pending_writes_and_new_ones_report_the_disk() -> None:
    rig = DiskRig(num_state_slots=6)
    rig.serve("a", PROMPT, 8)
    rig.holds = True
    rig.add("b", [9] * 30)
    for _ in range(4):
        rig.step()
    assert rig.pending
    rig.pending = []
    rig.lose_workers()
    rig.replace_workers()
    assert not rig.tier.index
    rig.scheduler.stored_keys(list(rig.contents), [])
    rig.drain()
    assert rig.output("b") == expected([9] * 30, 5)
    assert rig.serve("a again", PROMPT, 8) == 28


# ---- adapters


def adapted(rig: DiskRig, name: str, adapter: Adapter) -> Request:
    """Queue PROMPT with an adapter, which the workers have."""
    message = Generate(name, pack_tokens(PROMPT), SamplingParams(max_tokens=3))
    rig.scheduler.queues.adapters.change(adapter, is_loaded=True)
    rig.worker.adapters.add(adapter.number)
    request = Request(message, b"client", len(PROMPT) + 3, frozenset(), adapter)
    rig.scheduler.add(request)
    return request


def test_kv_of_an_adapter_is_written_once_its_files_are_known() -> None:
    rig = DiskRig(num_blocks=60, max_loras=1, max_cpu_loras=1)
    adapter = rig.scheduler.queues.adapters.make("a", "/a")
    adapted(rig, "early", adapter)
    rig.drain()
    assert not rig.contents
    adapter.read_as(b"digest")
    adapted(rig, "a", adapter)
    rig.drain()
    assert len(rig.contents) == 7
    again = restarted(rig, num_blocks=60, max_loras=1, max_cpu_loras=1)
    same = again.scheduler.queues.adapters.make("renamed", "/b")
    same.read_as(b"digest")
    request = adapted(again, "b", same)
    again.drain()
    assert request.num_cached_at_start == 28


def test_kv_computed_with_files_that_were_replaced_is_not_written_under_their_digest() -> None:
    rig = DiskRig(num_blocks=60, max_loras=1, max_cpu_loras=1)
    adapter = rig.scheduler.queues.adapters.make("a", "/a")
    adapter.read_as(b"digest")
    adapted(rig, "waits", adapter)
    adapter.read_as(b"other")  # it was evicted, and its folder has other files by now
    rig.drain()
    adapter.read_as(b"digest")
    adapted(rig, "later", adapter)
    rig.drain()
    assert not rig.contents
