"""A fork shares the block in which it parts from its parent. That one is another's as long as anybody can read it."""

import pytest

from tests.scheduler_rig import Rig, expected
from vllm_lite.engine.blocks.pool import NULL_BLOCK
from vllm_lite.engine.request import Request
from vllm_lite.engine.sequence import Sequence
from vllm_lite.protocol.api import Generate
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.params import SamplingParams

PROMPT = [1, 2, 3, 4, 5, 6]


def parent_of(rig: Rig, num_tokens: int) -> Request:
    """A request that has so many tokens."""
    parent = rig.add("parent", PROMPT, max_tokens=30)
    while parent.num_tokens < num_tokens:
        rig.step()
    return parent


def fork(rig: Rig, parent: Request, name: str, have: int) -> Sequence:
    """A fork from the first `have` tokens of output on, with 8 others than its parent's behind them."""
    output = parent.sequences[0].tokens[parent.num_prompt :][:have].tolist()
    params = SamplingParams(max_tokens=have + 8, temperature=2.0, seed=1)
    message = Generate(name, pack_tokens(PROMPT), params, have, pack_tokens(output))
    child = Request(message, b"client", len(PROMPT) + have + 8, frozenset())
    rig.scheduler.branching.fork_request(parent, child)
    rig.outputs[name, 0] = output
    return child.sequences[0]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_forks", [1, 2])
def test_a_block_that_can_be_found_is_not_written_by_the_fork_that_is_left_with_it(num_forks: int, depth: int) -> None:
    """The parent has filled the block and ended. A later prompt with the same tokens must find the parent's KV
    there."""
    rig = Rig(30, depth=depth)
    parent = parent_of(rig, 14)
    tokens = parent.sequences[0].tokens[:13].tolist()
    forks = [fork(rig, parent, f"fork{number}", have=4) for number in range(num_forks)]
    rig.abort("parent")
    for _ in range(4):
        rig.step()
    rig.add("again", tokens, max_tokens=5)
    rig.drain()
    assert all(rig.output(each.request.request_id)[4:] == expected(tokens[:10], 8, seed=1) for each in forks)
    assert rig.output("again") == expected(tokens, 5)
    assert rig.scheduler.counters.cached_tokens == 12, "and find it"
    assert rig.kv.counters.copied_blocks == num_forks


def test_a_fork_copies_no_block_without_a_prefix_cache() -> None:
    rig = Rig(30, caching=False)
    parent = parent_of(rig, 14)
    tokens = parent.sequences[0].tokens[:10].tolist()
    fork(rig, parent, "fork", have=4)
    rig.abort("parent")
    rig.drain()
    assert rig.output("fork")[4:] == expected(tokens, 8, seed=1)
    assert rig.kv.counters.copied_blocks == 0


@pytest.mark.parametrize("whose", ["fork", "parent"])
@pytest.mark.parametrize("max_swap_blocks", [1, 2])
def test_the_shared_blocks_that_a_sequence_writes_next_are_swapped_in_all_groups_or_none(
    whose: str, max_swap_blocks: int
) -> None:
    """Blocks that come back from the host are its own. A block that stayed, since a step moves only so many, would not
    be."""
    rig = Rig(60, windows=(None, 20), num_host_blocks=40, max_swap_blocks=max_swap_blocks)
    parent = parent_of(rig, 14)
    child = fork(rig, parent, "fork", have=8)
    sequence = child if whose == "fork" else parent.sequences[0]
    held = [list(table.ids) for table in sequence.tables]
    rig.blocks.swapping.begin_step()
    assert rig.kv.swap_out(sequence) is (max_swap_blocks == 2)
    left_behind = held if max_swap_blocks == 1 else [[*ids[:-1], NULL_BLOCK] for ids in held]
    assert [table.ids for table in sequence.tables] == left_behind


@pytest.mark.parametrize("block_size", [4, 8])
@pytest.mark.parametrize("num_tokens", range(8, 20))
def test_a_parent_with_wrong_drafts_in_flight_writes_to_no_block_of_its_fork(num_tokens: int, block_size: int) -> None:
    """The drafts counted as computed when the parent was forked. The parent then writes to a copy of the shared
    block."""
    rig = Rig(60, block_size, depth=2, num_drafts=5, max_num_batched_tokens=64)
    parent = parent_of(rig, num_tokens)
    tokens = parent.sequences[0].tokens.tolist()
    assert parent.sequences[0].num_drafted
    have = parent.num_tokens - len(PROMPT)
    fork(rig, parent, "fork", have)
    fork(rig, parent, "early", have - 2)
    while (result := rig.worker.poll()) is not None:  # before the next step is scheduled
        for item in rig.scheduler.update(result):
            rig.record(item)
        rig.scheduler.check_integrity()
    rig.drain()
    assert rig.output("parent") == expected(PROMPT, 30)
    assert rig.output("fork")[have:] == expected(tokens, 8, seed=1)
    assert rig.output("early")[have - 2 :] == expected(tokens[:-2], 8, seed=1)
