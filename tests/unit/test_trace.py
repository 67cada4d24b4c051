"""The trace file: its contents, its size, and errors when it cannot be written."""

import logging
import os
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.recorded import Recorded, agrees, snapshot
from vllm_lite.engine.intake import ModelFacts
from vllm_lite.engine.observe.recorder import RecordedScheduler
from vllm_lite.engine.observe.replay import Replay
from vllm_lite.engine.scheduling.scheduler import Scheduler
from vllm_lite.errors import ConfigError, ProtocolError
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.trace import records
from vllm_lite.trace.reader import TraceReader
from vllm_lite.trace.segments import header_of
from vllm_lite.trace.story import story
from vllm_lite.trace.writer import TraceWriter


@pytest.mark.parametrize("tokens", [[], [0], [255, 1], [256, 7], [65536, 2], [2**24, 3], [2**32 - 1]])
def test_packed_tokens_come_back(tokens: list[int]) -> None:
    data = pack_tokens(tokens)
    packed, width = records.pack_tokens(data)
    assert records.unpack_tokens(packed, width) == data
    assert len(packed) == width * len(tokens)
    assert width == max([1, *((token.bit_length() + 7) // 8 for token in tokens)])


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "trace", num_host_blocks=10, preemption_mode="swap")
    recorded.random_work(random.Random(3), 60)
    recorded.core.close()
    reader = TraceReader(str(tmp_path / "trace"))
    writer = TraceWriter(str(tmp_path / "copy"))
    everything = [reader.header, *reader]
    for record in everything:
        writer.write(record)
    writer.close()
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "trace").read_bytes()
    kinds = {type(record) for record in everything}
    assert kinds >= {records.Arrival, records.Forked, records.Aborted, records.Expired, records.Step, records.Result}


@pytest.mark.parametrize("num_running", [1, 16, 64])
def test_a_recorded_step_takes_100_bytes_and_4_for_each_token(tmp_path: Path, num_running: int) -> None:
    """With block hashes and reasons, and the vocabulary of a large model; the rows of requests are counted apart."""
    settings: dict[str, Any] = {"block_size": 16, "max_num_seqs": 256, "max_num_batched_tokens": 8192}
    recorded = Recorded(tmp_path / "trace", num_running * 12 + 2, **settings)
    recorded.core.intake._model = ModelFacts(200_000, frozenset())
    recorded.worker.vocab_size = 200_000
    rng = random.Random(1)
    for index in range(num_running):
        prompt = [rng.randrange(200_000) for _ in range(rng.randint(20, 60))]
        recorded.add(f"r{index}", prompt, max_tokens=100, ignore_eos=True)
    recorded.loop()
    before = recorded.core.scheduler
    assert isinstance(before, RecordedScheduler)
    before.flush()
    size, steps = (tmp_path / "trace").stat().st_size, recorded.scheduler.step
    tokens = recorded.scheduler.counters.generated_tokens
    recorded.drain()
    recorded.core.close()
    num_bytes = (tmp_path / "trace").stat().st_size - size
    num_steps = recorded.scheduler.step - steps
    num_tokens = recorded.scheduler.counters.generated_tokens - tokens
    assert num_bytes <= 100 * num_steps + 4 * num_tokens
    print(f"{num_running}: {num_bytes / num_steps:.0f} bytes a step, {num_bytes / num_tokens:.2f} a token")
    agrees(tmp_path / "trace", recorded)


def test_no_prompt_is_in_the_file(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "trace", 60, block_size=4)
    prompt = [41, 43, 47, 40, 48, 49, 45, 46] * 3
    salt = "a secret of the tenant"
    recorded.add("a", prompt, max_tokens=4, cache_salt=salt, stop=["private words"])
    recorded.drain()
    recorded.core.close()
    data = (tmp_path / "trace").read_bytes()
    for width in (1, 2, 4):
        for count in (4, 8):
            assert b"".join(token.to_bytes(width, "little") for token in prompt[:count]) not in data
            assert b"".join(token.to_bytes(width, "big") for token in prompt[:count]) not in data
    assert salt.encode() not in data
    assert b"private" not in data
    hashes = snapshot(recorded.core.kv.pool)
    assert len(hashes) >= 6
    assert not any(bytes.fromhex(text[:32]) in data for _, _, text in hashes if text), "digests are cut to 8 bytes"


def test_a_file_that_ends_within_a_record_ends_before_it(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "trace")
    recorded.random_work(random.Random(1))
    recorded.core.close()
    whole = (tmp_path / "trace").read_bytes()
    for cut in range(1, 40, 3):
        (tmp_path / "cut").write_bytes(whole[:-cut])
        replay = Replay(str(tmp_path / "cut")).run()
        assert replay.divergence is None
        assert replay.scheduler.step <= recorded.scheduler.step
    assert replay.reader.cut_off or len(list(TraceReader(str(tmp_path / "cut")))) < len(
        list(TraceReader(str(tmp_path / "trace")))
    )


def test_damage_is_reported(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "trace")
    recorded.random_work(random.Random(1))
    recorded.core.close()
    whole = bytearray((tmp_path / "trace").read_bytes())
    length = int.from_bytes(whole[8:12], "little")
    damaged = bytes(whole[: 16 + length]) + b"\xc1" * 99
    (tmp_path / "damaged").write_bytes(damaged)
    with pytest.raises(ProtocolError, match="damaged"):
        Replay(str(tmp_path / "damaged")).run()
    whole[7] = 99
    (tmp_path / "newer").write_bytes(whole)
    with pytest.raises(ProtocolError, match="a trace of version 99; this version reads 12"):
        TraceReader(str(tmp_path / "newer"))


@pytest.mark.parametrize(
    "change",
    [{"options": {"max_num_rows": 8}}, {"options": {}}, {"block_size": 0}, {"num_blocks": 1}],
    ids=["a name of another version", "none", "a block of no tokens", "a pool of no blocks"],
)
def test_a_header_that_makes_no_scheduler_is_reported(tmp_path: Path, change: dict[str, Any]) -> None:
    recorded = Recorded(tmp_path / "trace")
    recorded.core.close()
    writer = TraceWriter(str(tmp_path / "damaged"))
    writer.write(msgspec.structs.replace(header_of(str(tmp_path / "trace")), **change))
    writer.close()
    with pytest.raises(ProtocolError, match="damaged, its header makes no scheduler: "):
        Replay(str(tmp_path / "damaged"))


@pytest.mark.parametrize("decision", [[99, 0, 0], [2, 0, 0], [9, 0, 0, 77, 1], [19, 0, 0]])
def test_a_damaged_decision_is_shown_as_such(tmp_path: Path, decision: list[int]) -> None:
    recorded = Recorded(tmp_path / "trace")
    recorded.add("a", list(range(9)))
    recorded.loop()
    recorded.core.close()
    reader, writer = TraceReader(str(tmp_path / "trace")), TraceWriter(str(tmp_path / "damaged"))
    for record in [reader.header, *reader]:
        changes = {"decisions": [decision]} if isinstance(record, records.Step | records.Result) else {}
        writer.write(msgspec.structs.replace(record, **changes))
    writer.close()
    assert f"a has a damaged decision: {decision}" in str(Replay(str(tmp_path / "damaged")).run().divergence)
    assert f"Has a damaged decision: {decision}" in "".join(story("a", TraceReader(str(tmp_path / "damaged"))))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("pause_s", [0.0, 2.0], ids=["when the buffer is full", "when it is flushed"])
def test_a_full_disk_ends_the_trace_and_not_the_engine(pause_s: float, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vllm_lite"):
        recorded = Recorded(Path("/dev/full"), 40)
        recorder = recorded.core.scheduler
        assert isinstance(recorder, RecordedScheduler)
        recorder.next_flush_s += 0.0 if pause_s else 1e9
        for index in range(300):
            recorded.add(f"{index:0200}", [1, 2, index % 50, 4, 5], max_tokens=3, ignore_eos=True)
            recorded.clock.now_s += pause_s
            recorded.loop()
        recorded.drain()
    assert len(recorded.ended) == 300
    assert [record.message for record in caplog.records] == [
        "the trace /dev/full ends here, serving continues: [Errno 28] No space left on device"
    ]
    assert recorded.scheduler.on_decision is None
    recorded.core.close()


def test_a_file_that_cannot_be_opened_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"record: .*cannot be written \(No such file or directory\)"):
        Recorded(tmp_path / "missing" / "trace")


def test_an_older_trace_is_kept_and_only_the_owner_reads_it(tmp_path: Path) -> None:
    (tmp_path / "trace").write_bytes(b"older")
    Recorded(tmp_path / "trace").core.close()
    assert (tmp_path / "trace.previous").read_bytes() == b"older"
    assert (tmp_path / "trace").stat().st_mode & 0o777 == 0o600


def test_a_step_that_raises_is_in_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps before a crash can be replayed up to it, and into it."""
    recorded = Recorded(tmp_path / "trace")
    recorded.add("a", [1, 2, 3], max_tokens=9, ignore_eos=True)
    recorded.loop()
    with monkeypatch.context() as patch:
        patch.setattr(recorded.scheduler._prompts, "schedule", None)
        recorded.add("b", [4, 5, 6])
        with pytest.raises(TypeError):
            recorded.loop()
    recorded.core.close()
    *_, last = TraceReader(str(tmp_path / "trace"))
    assert isinstance(last, records.Step)
    assert last.digest == b""


def test_nothing_is_recorded_unless_asked_for(tmp_path: Path) -> None:
    recorded = Recorded(None)
    recorded.random_work(random.Random(2))
    assert type(recorded.core.scheduler) is Scheduler
    assert recorded.scheduler.on_decision is None
    assert list(tmp_path.iterdir()) == []
