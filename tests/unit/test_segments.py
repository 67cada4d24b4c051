"""A trace that continues after deaths of processes: deaths of workers within a file, and the files of successive
engines."""

import logging
import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests.recorded import Recorded, agrees, replaced, rewritten
from vllm_lite.engine.observe.replay import Replay
from vllm_lite.engine.scheduling.scheduler import Scheduler
from vllm_lite.errors import ConfigError, ProtocolError
from vllm_lite.protocol.api import Generate
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.tools.cli import main
from vllm_lite.trace import records
from vllm_lite.trace.reader import TraceReader
from vllm_lite.trace.segments import header_of, segment_path, segment_paths
from vllm_lite.trace.story import story

PROMPT = list(range(1, 11))
CAUSE = "worker 0 (pid 7) died: killed by SIGKILL"


def life(path: Path, number: int, launch: str = "abc", **settings: Any) -> Recorded:
    """The engine of this life, which has computed nothing yet."""
    recorded = Recorded(path, life=number, launch=launch, **settings)
    recorded.clock.now_s += 100 * number
    return recorded


def worked(path: Path, number: int, launch: str = "abc") -> Path:
    recorded = life(path, number, launch)
    recorded.random_work(random.Random(number), 10, death_rate=0.2)
    recorded.core.close()
    return Path(segment_path(str(path), number))


# ---- deaths of workers


def died(path: Path, cause: str = CAUSE) -> Path:
    """`running` has some tokens when the workers die, `waits` none; `late` passes its deadline before others come."""
    recorded = Recorded(path, max_num_seqs=2)
    recorded.add("running", PROMPT, max_tokens=9, ignore_eos=True)
    recorded.add("samples", [3, 4], max_tokens=9, ignore_eos=True, n=2, prompt_logprobs=1)
    for _ in range(5):
        recorded.loop()
    recorded.add("waits", [7, 8], max_tokens=3, ignore_eos=True)
    recorded.add("late", [9], deadline_ms=500)
    recorded.lose_workers(cause)
    recorded.add("came", [9, 9], max_tokens=3, ignore_eos=True)
    recorded.clock.now_s += 1.25
    recorded.loop()
    recorded.replace_workers()
    recorded.drain()
    agrees(path, recorded)
    return path


def test_a_death_is_a_chapter_of_a_story(tmp_path: Path) -> None:
    trace = str(died(tmp_path / "trace"))
    lines = story("running", TraceReader(trace))
    (at,) = [place for place, line in enumerate(lines) if "The workers died" in line]
    assert lines[at].endswith(f"  The workers died ({CAUSE}); its 5 tokens of output were kept.")
    assert lines[at + 1].endswith("  Workers of generation 4 took over after 1.250 s.")
    assert "Was resumed, to compute 15 tokens" in lines[at + 2]
    assert lines[-1].endswith("  Finished at its greatest length after 9 tokens of output.")
    assert any("its 5 tokens of output were kept" in line for line in story("samples", TraceReader(trace)))
    assert any("; it had no output yet." in line for line in story("waits", TraceReader(trace)))
    late = story("late", TraceReader(trace))
    assert any("The workers died" in line for line in late)
    assert late[-1].endswith("because its deadline had passed."), "no others take over for it"
    came = story("came", TraceReader(trace))
    assert not any("The workers died" in line for line in came)
    assert not any("took over" in line for line in came)


def test_the_story_of_an_ended_request_has_no_loss_of_workers(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "trace")
    recorded.add("a", PROMPT, max_tokens=2, ignore_eos=True)
    recorded.drain()
    recorded.lose_workers()
    recorded.replace_workers()
    recorded.core.close()
    assert not any("orkers" in line for line in story("a", TraceReader(str(tmp_path / "trace"))))


def test_a_long_cause_is_cut(tmp_path: Path) -> None:
    trace = str(died(tmp_path / "trace", "x" * 10_000))
    (lost,) = [record for record in TraceReader(trace) if isinstance(record, records.WorkersLost)]
    assert lost.cause == "x" * records.MAX_CAUSE_CHARS
    assert [(kept.num_output, kept.num_scored) for kept in lost.kept] == [(5, 0), (5, 2), (0, 0), (0, 0)]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (records.WorkersLost, {"kept": []}),
        (records.WorkersReplaced, {"generation": 9}),
    ],
)
def test_another_death_is_another_trace(tmp_path: Path, kind: type, changes: dict[str, Any]) -> None:
    """Without its requests a death does not fit, and with another generation the state differs."""
    path, _ = rewritten(died(tmp_path / "trace"), lambda record, _step: replaced(record, kind, **changes))
    replay = Replay(path).run()
    if kind is records.WorkersLost:
        assert replay.divergence is not None
        assert replay.divergence.what == "other requests were left"
    else:
        assert replay.scheduler.generation == 9


def test_known_scores_limit_the_prefix_taken_from_the_cache(tmp_path: Path) -> None:
    """A trace has no scores, only the number of known ones when the workers died. With another number the replay
    differs."""
    recorded = Recorded(tmp_path / "trace", scheduling_policy="priority", max_num_batched_tokens=40)
    recorded.add("scored", PROMPT, max_tokens=9, ignore_eos=True, prompt_logprobs=1)
    for _ in range(4):
        recorded.loop()
    recorded.lose_workers()
    recorded.replace_workers()
    recorded.add(
        "first", PROMPT, max_tokens=3, priority=-1
    )  # its blocks are cached when the other one is admitted again
    recorded.drain()
    agrees(tmp_path / "trace", recorded)

    def change(record: records.Record, _step: int) -> records.Record:
        if isinstance(record, records.WorkersLost):
            kept = [records.Kept(each.number, each.num_output, 3) for each in record.kept]
            return replaced(record, records.WorkersLost, kept=kept)
        return record

    path, _ = rewritten(tmp_path / "trace", change)
    divergence = Replay(path).run().divergence
    assert divergence is not None
    assert "another step was made" in divergence.what


def test_a_trace_may_end_while_there_are_no_workers(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "trace")
    recorded.add("a", PROMPT, max_tokens=9)
    recorded.loop()
    recorded.lose_workers()
    assert not agrees(tmp_path / "trace", recorded).scheduler.has_workers


def test_a_death_is_written_at_once(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "trace")
    recorded.add("a", PROMPT, max_tokens=9)
    recorded.loop()
    recorded.lose_workers(CAUSE)
    *_, last = TraceReader(str(tmp_path / "trace"))
    assert isinstance(last, records.WorkersLost)
    recorded.core.close()


# ---- deaths of the engine


def test_every_engine_start_writes_its_file_and_a_launchs_files_are_found(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    first, second, fourth, tenth = (worked(path, number) for number in (1, 2, 4, 10))
    worked(path, 3, launch="older")
    (tmp_path / "trace.5").write_bytes(b"")  # killed before it wrote anything
    (tmp_path / "trace.6").write_bytes(b"no trace")
    (tmp_path / "trace.7").write_bytes(second.read_bytes())  # says that it is of another life
    (tmp_path / "trace.8").mkdir()
    (tmp_path / "trace.previous").write_bytes(first.read_bytes())
    (tmp_path / "trace.²").write_bytes(second.read_bytes())
    (tmp_path / "other.2").write_bytes(second.read_bytes())
    assert segment_paths(str(path)) == [str(each) for each in (first, second, fourth, tenth)]
    assert segment_paths(str(second)) == [str(second)]
    header = header_of(str(fourth))
    assert (header.life, header.launch) == (4, "abc")


def test_a_path_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worked(tmp_path / "trace", 1)
    worked(tmp_path / "trace", 2)
    monkeypatch.chdir(tmp_path)
    assert segment_paths("trace") == ["trace", "trace.2"]


def test_an_engine_without_a_launcher_has_one_file(tmp_path: Path) -> None:
    worked(tmp_path / "trace", 1, launch="")
    worked(tmp_path / "trace", 2, launch="")
    assert segment_paths(str(tmp_path / "trace")) == [str(tmp_path / "trace")]
    with pytest.raises(ProtocolError, match="cannot be read"):
        segment_paths(str(tmp_path / "missing"))


def test_replay_takes_each_segment_for_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = worked(tmp_path / "trace", 1)
    second = worked(tmp_path / "trace", 2)
    assert main(["replay", str(path), "--assert"]) == 0
    out = capsys.readouterr().out
    assert out.count("every decision is the one recorded") == 2
    assert f"{path}, life 1 of the engine:" in out
    assert f"{second}, life 2 of the engine:" in out
    assert main(["replay", str(path), "--until", "step=3"]) == 0
    out = capsys.readouterr().out
    assert "3 steps" in out
    assert "life" not in out, "a step is one of the file that is named"
    changed, _ = rewritten(second, lambda record, _step: replaced(record, records.Step, digest=b"12345678"))
    Path(changed).rename(second)
    assert main(["replay", str(path)]) == 0
    assert main(["replay", str(path), "--assert"]) == 1
    assert main(["replay", str(second), "--assert"]) == 1
    assert capsys.readouterr().out.count("DIVERGED at step") == 3


def lives(path: Path) -> list[str]:
    """Record three lives: `kept` and `samples` run through all, `lost` is not sent again, `new` arrives in the
    second."""
    first = life(path, 1)
    first.add("lost", PROMPT, max_tokens=9, ignore_eos=True)
    first.add("done", [5], max_tokens=1, ignore_eos=True)
    first.add("kept", PROMPT[::-1], max_tokens=9, ignore_eos=True)
    first.add("samples", [3, 4], max_tokens=9, ignore_eos=True, n=2)
    for _ in range(6):
        first.loop()
    output = first.scheduler.requests["kept"].sequences[0].tokens[len(PROMPT) :].tolist()
    assert len(output) == 5
    first.core.close()
    for number in (2, 3):
        again = life(path, number)
        again.add("new" if number == 2 else "done", [1, 2], max_tokens=1, ignore_eos=True)
        params = SamplingParams(max_tokens=9, ignore_eos=True)
        again.core.add(b"c", Generate("kept", pack_tokens(PROMPT[::-1]), params, len(output), pack_tokens(output)))
        again.add("samples", [3, 4], max_tokens=9, ignore_eos=True, n=2)
        again.drain() if number == 3 else again.loop()
        again.core.close()
    return segment_paths(str(path))


def test_the_death_of_the_engine_is_a_chapter_of_a_story(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = lives(tmp_path / "trace")

    def why(name: str) -> list[str]:
        assert main(["why", name, paths[0]]) == 0
        return capsys.readouterr().out.splitlines()

    kept = why("kept")
    assert sum("The engine died and was replaced; it came back with 5 tokens of output." in line for line in kept) == 2
    assert sum("Arrived" in line for line in kept) == 1
    assert kept[-1].endswith("Finished at its greatest length after 9 tokens of output.")
    times = [float(time) for line in kept for time in re.findall(r"^\+ *([\d.]+) s", line)]
    assert times == sorted(times)
    assert 100 < times[-1] < 300, "counted from the arrival in the first segment"
    assert sum("it came back with no tokens of output" in line for line in why("samples")) == 2
    lost = why("lost")
    assert lost[-1].endswith("The engine died and was replaced; it did not come back.")
    assert sum("did not come back" in line for line in lost) == 1
    assert not any("engine died" in line for line in why("new"))
    done = why("done")
    assert not any("engine died" in line for line in done), "it had ended; the later one has its name"
    assert sum("Arrived" in line for line in done) == 2
    assert main(["why", "nobody", paths[0]]) == 2
    assert "is none of the 5 in this trace; the first are 'lost', 'done', 'kept'" in capsys.readouterr().err


def test_samples_that_came_back_are_counted_together() -> None:
    from vllm_lite.trace.story import _Story

    found = _Story("r")
    found._open = {0, 1}
    arrival = records.Arrival(
        0, "r", 1.0, 3, 0, 9, [], None, records.Params(2, 0, 0, None, None, False), b"", [(0, 4), (1, 3)]
    )
    (line,) = found._came_back(arrival)
    assert line.endswith("it came back with 7 tokens of output.")


def test_a_later_life_serves_without_a_trace_if_it_must(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "gone" / "trace"
    with pytest.raises(ConfigError, match="cannot be written"):
        life(path, 1)
    with caplog.at_level(logging.WARNING, "vllm_lite"):
        recorded = life(path, 2)
    assert "serves without a trace" in caplog.text
    assert type(recorded.core.scheduler) is Scheduler
    recorded.add("a", PROMPT, max_tokens=2)
    recorded.drain()


def test_an_older_segment_is_kept(tmp_path: Path) -> None:
    (tmp_path / "trace.2").write_bytes(b"older")
    (tmp_path / "trace").write_bytes(b"first")
    life(tmp_path / "trace", 2).core.close()
    assert (tmp_path / "trace.2.previous").read_bytes() == b"older"
    assert (tmp_path / "trace").read_bytes() == b"first"
