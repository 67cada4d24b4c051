"""Replay makes the same decisions as a recorded core under any events, and finds the step at which a trace was
changed."""

import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.recorded import VOCAB, Recorded, agrees, replaced, rewritten
from vllm_lite.engine.observe.replay import Replay
from vllm_lite.errors import ProtocolError
from vllm_lite.trace import records

configurations = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(6, 40),
        "block_size": st.sampled_from([1, 4, 8]),
        "enable_prefix_caching": st.booleans(),
        "windows": st.sampled_from([(), (None,), (None,), (5,), (8,), (None, 6), (None, 3, 9)]),
        "num_host_blocks": st.sampled_from([0, 3, 12, 60]),
        "max_swap_blocks_per_step": st.sampled_from([1, 3, 10**9]),
        "max_itl_ms": st.sampled_from([None, 1000.0]),
        "num_state_slots": st.sampled_from([0, 0, 3, 9]),
        "num_host_states": st.sampled_from([0, 4]),
        "has_media": st.booleans(),
        "preemption_mode": st.sampled_from(["auto", "recompute", "swap"]),
        "async_scheduling": st.booleans(),
        "speculative_config": st.sampled_from([None, None, {"num_speculative_tokens": 3}]),
        "scheduling_policy": st.sampled_from(["fcfs", "priority", "deadline", "fair", "tests.recorded:OddPolicy"]),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(6, 40),
    }
)


@settings(max_examples=examples(120), phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(seed=st.integers(0, 2**32), configuration=configurations)
def test_replay_repeats_all_decisions(seed: int, configuration: dict[str, Any]) -> None:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace"
        recorded = Recorded(trace, **configuration)
        recorded.random_work(rng, death_rate=rng.choice([0.0, 0.15]))
        if rng.random() < 0.3:
            recorded.drain()
        agrees(trace, recorded)


@pytest.mark.parametrize("ranks", [1, 4])
def test_ranks_are_named_and_decide_nothing(tmp_path: Path, ranks: int) -> None:
    recorded = Recorded(tmp_path / "trace", 14, tensor_parallel_size=ranks)
    recorded.random_work(random.Random(5), 20)
    recorded.core.close()
    replay = Replay(str(tmp_path / "trace")).run()
    assert replay.reader.header.tensor_parallel_size == ranks
    named = "recorded with 4 ranks, each with a part of every block" in replay.report()
    assert (named, replay.divergence) == (ranks > 1, None)


@pytest.fixture
def busy(tmp_path: Path) -> tuple[Path, Recorded]:
    """A trace with preemptions, swaps, demotions and hits."""
    trace = tmp_path / "trace"
    recorded = Recorded(trace, 14, num_host_blocks=20, preemption_mode="swap", max_num_seqs=4)
    recorded.random_work(random.Random(5), 60)
    recorded.drain()
    recorded.core.close()
    counters = recorded.scheduler.counters
    assert (
        min(counters.swaps, counters.preemptions, counters.cached_tokens, recorded.core.kv.counters.demoted_blocks) > 0
    )
    return trace, recorded


def test_the_final_state_is_the_recorded_one(busy: tuple[Path, Recorded]) -> None:
    trace, recorded = busy
    replay = agrees(trace, recorded)
    assert replay.report()[-1] == "every decision is the one recorded"
    assert replay.scheduler.counters.preemptions == recorded.scheduler.counters.preemptions


def test_until_stops_behind_that_step(busy: tuple[Path, Recorded]) -> None:
    trace, recorded = busy
    replay = Replay(str(trace)).run(until=17)
    assert replay.scheduler.step == 17
    assert replay.scheduler.requests
    assert Replay(str(trace)).run(until=10**6).scheduler.step == recorded.scheduler.step


def test_without_checks_it_only_decides(busy: tuple[Path, Recorded]) -> None:
    trace, recorded = busy
    replay = Replay(str(trace), check=False).run()
    assert replay.divergence is None
    assert replay.scheduler.step == recorded.scheduler.step


def test_a_changed_digest_is_found_at_its_step(busy: tuple[Path, Recorded]) -> None:
    def change(record: records.Record, step: int) -> records.Record:
        return replaced(record, records.Step, digest=b"12345678") if step == 23 else record

    path, _ = rewritten(busy[0], change)
    divergence = Replay(path).run().divergence
    assert divergence is not None
    assert divergence.step == 23
    assert "another step was made" in divergence.what
    assert "digest 3132333435363738" in divergence.recorded
    assert "entries" in divergence.replayed


def test_a_changed_block_hash_is_found_where_it_would_have_been_a_hit(busy: tuple[Path, Recorded]) -> None:
    def change(record: records.Record, step: int) -> records.Record:
        hits = isinstance(record, records.Step) and any(
            decision[0] == records.Code.ADMITTED and decision[4] >= 4 for decision in record.decisions
        )
        if not hits or not isinstance(record, records.Step) or not record.hashes:
            return record
        return replaced(record, records.Step, hashes=bytes(len(record.hashes)))

    path, where = rewritten(busy[0], change)
    divergence = Replay(path).run().divergence
    assert divergence is not None
    assert divergence.step == where


def test_a_changed_token_is_found_where_the_request_would_have_ended(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "trace")
    recorded.add("a", [1, 2, 3], max_tokens=12, ignore_eos=True, stop_token_ids=[VOCAB - 1])
    recorded.drain()
    recorded.core.close()

    def change(record: records.Record, step: int) -> records.Record:
        return replaced(record, records.Result, tokens=bytes([VOCAB - 1])) if step == 6 else record

    path, _ = rewritten(tmp_path / "trace", change)
    divergence = Replay(path).run().divergence
    assert divergence is not None
    assert (divergence.step, divergence.what) == (5, "other requests ended")  # one more step was sent ahead of it
    assert divergence.replayed == "a finished by a stop token after 5 tokens of output"


@pytest.mark.parametrize(
    ("kind", "changes", "what"),
    [
        (records.Step, {"hashes": b"12345678" * 99}, "fewer blocks were hashed"),
        (records.Arrival, {"hashes": b""}, "more blocks were hashed"),
        (records.Result, {"counts": [9, 9, 9]}, "replay failed"),
        (records.Aborted, {"number": 10**6}, "replay failed"),
        (records.Expired, {"clock_s": 0.0}, "other deadlines passed"),
    ],
)
def test_a_trace_that_makes_no_sense_is_a_divergence(
    busy: tuple[Path, Recorded], kind: type, changes: dict[str, Any], what: str
) -> None:
    path, _ = rewritten(busy[0], lambda record, _step: replaced(record, kind, **changes))
    divergence = Replay(path).run().divergence
    assert divergence is not None
    assert what in divergence.what


def test_decisions_of_another_code_are_found(busy: tuple[Path, Recorded], monkeypatch: pytest.MonkeyPatch) -> None:
    """The use of it all: a replay notices code that hands out blocks in another order than the code that recorded."""
    from vllm_lite.engine.blocks.pool import FreeList

    take = FreeList.popleft_n
    monkeypatch.setattr(FreeList, "popleft_n", lambda self, count: take(self, count)[::-1])
    divergence = Replay(str(busy[0])).run().divergence
    assert divergence is not None
    assert divergence.step <= 10


def test_files_that_are_no_traces_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"something else")
    with pytest.raises(ProtocolError, match="not a trace"):
        Replay(str(path))
    with pytest.raises(ProtocolError, match="cannot be read"):
        Replay(str(tmp_path / "missing"))
