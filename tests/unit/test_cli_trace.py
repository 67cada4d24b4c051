"""The output of `vllm-lite replay` and `vllm-lite why`."""

import random
import re
from pathlib import Path

import pytest

from tests.recorded import Recorded, replaced, rewritten
from vllm_lite.protocol.api import ForkRequest
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.tools.cli import main
from vllm_lite.trace import records


def make_trace(path: Path) -> Path:
    """Two requests that fight for blocks, a third that waits for them, one that is aborted, one that is too late."""
    recorded = Recorded(path, 10, num_host_blocks=20, preemption_mode="swap", max_num_seqs=4)
    recorded.add("first", [1, 2, 3, 4, 5, 6], max_tokens=20, ignore_eos=True)
    recorded.add("second", [11, 12, 13, 14, 15, 16], max_tokens=20, ignore_eos=True)
    recorded.loop()
    recorded.add("third", list(range(20, 42)), max_tokens=4, n=2, ignore_eos=True)
    recorded.add("late", [1], deadline_ms=10)
    recorded.add("unwanted", [2])
    for _ in range(4):
        recorded.loop()
    recorded.core.abort("unwanted")
    recorded.drain()
    recorded.add("again", [1, 2, 3, 4, 5, 6, 7], max_tokens=2, ignore_eos=True)
    recorded.drain()
    recorded.core.close()
    return path


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_trace(tmp_path_factory.mktemp("traces") / "trace")


def why(request: str, trace: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["why", request, str(trace)]) == 0
    return capsys.readouterr().out


def test_replay_prints_its_counts(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(trace), "--assert"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\d+ steps, 6 requests, \d+ tokens, [1-9]\d* preemptions \([1-9]\d* by swap\)", out)
    assert "0 running, 0 waiting, 0 of 9 blocks in use" in out
    assert "every decision is the one recorded" in out


@pytest.mark.parametrize("until", ["step=3", "3"])
def test_replay_until_a_step_shows_its_state(trace: Path, capsys: pytest.CaptureFixture[str], until: str) -> None:
    assert main(["replay", str(trace), "--until", until]) == 0
    assert "3 steps" in (out := capsys.readouterr().out)
    assert "4 running, 1 waiting" in out


def test_a_divergence_fails_only_if_asked(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, where = rewritten(
        trace, lambda record, step: replaced(record, records.Step, digest=b"12345678") if step == 7 else record
    )
    assert main(["replay", path]) == 0
    assert main(["replay", path, "--assert"]) == 1
    assert main(["replay", path, "--assert", "--until", f"step={where - 1}"]) == 0
    out = capsys.readouterr().out
    assert out.count("DIVERGED at step 7: another step was made") == 2
    assert re.search(r"recorded: .*digest 3132333435363738\n  replayed: \d+ entries, \d+ tokens", out)


def test_bad_arguments_are_refused(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path / "missing")]) == 2
    assert "cannot be read (No such file" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["replay", str(trace), "--until", "tomorrow"])
    assert stopped.value.code == 2
    assert "must look like step=100, got 'tomorrow'" in capsys.readouterr().err


def test_why_tells_of_waiting_and_swapping(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = [why(name, trace, capsys) for name in ("first", "second")]
    assert any(
        "was preempted to make room for itself" in text.lower() and "its blocks were swapped out" in text
        for text in shown
    )
    assert any("Was swapped in again" in text for text in shown)
    for text in shown:
        assert "Arrived with a prompt of 6 tokens and may grow to 26" in text
        assert re.search(r"Was admitted, to compute 6 tokens in 2 blocks\.", text)
        assert text.rstrip().endswith("Finished at its greatest length after 20 tokens of output.")
    times = [float(match) for match in re.findall(r"^\+ *([\d.]+) s", shown[0], re.MULTILINE)]
    assert times == sorted(times)
    assert times[0] == 0.0


def test_why_tells_of_samples_and_blocks_that_were_short(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = why("third", trace, capsys)
    assert "in 2 samples" in text
    assert re.search(r"aited, because it needed \d+ blocks? and \d+ (was|were) free.*that took \d+\.\d+ s", text)
    assert "Sample 1 finished at its greatest length after 4 tokens" in text


def test_why_tells_of_ends_and_cached_tokens(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "because its deadline had passed" in why("late", trace, capsys)
    assert "Was aborted" in why("unwanted", trace, capsys)
    assert "with 4 tokens found in the cache" in why("again", trace, capsys)


def test_why_tells_of_drafts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace"
    recorded = Recorded(path, speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    recorded.add("one", [1, 2, 3], max_tokens=24, ignore_eos=True)
    recorded.add("two", [1, 2, 4], max_tokens=24, ignore_eos=True, n=2)
    recorded.drain()
    recorded.core.close()
    counts = recorded.core.stats().drafts_by["ngram"]
    found = []
    for name in ("one", "two"):
        text = why(name, path, capsys)
        pattern = r"(\d+) tokens? drafted by ngram in (\d+) steps?, of which (\d+) were right"
        found += re.findall(pattern + r" \(by their place: ([\d, ]+)\)", text)
    assert len(found) == 3, "one for each sample"
    sums = [sum(int(each[place]) for each in found) for place in range(3)]
    assert sums == [counts.tokens, counts.drafts, counts.accepted]
    assert sum(int(count) for each in found for count in each[3].split(", ")) == counts.accepted > 0
    assert re.search(r"Sample 1 had \d+ tokens? drafted", text)
    assert main(["replay", str(path), "--assert"]) == 0


@pytest.mark.parametrize("how", ["aborted", "one sample", "late"])
def test_why_has_the_drafts_of_requests_that_ended_early(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace"
    recorded = Recorded(path, speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    recorded.add("one", [1, 2, 3], max_tokens=400, ignore_eos=True, n=2, deadline_ms=9000 if how == "late" else None)
    recorded.add("other", [1, 2, 4], max_tokens=4, ignore_eos=True)
    while recorded.core.stats().accepted_tokens < 5:
        recorded.loop()
    if how == "late":
        recorded.clock.now_s += 10.0
        recorded.loop()
    else:
        recorded.core.abort("one", [1] if how == "one sample" else [])
    recorded.core.close()
    text = why("one", path, capsys)
    found = re.findall(r"Sample (\d) had \d+ tokens? drafted by ngram in \d+ steps?, of which \d+ were right", text)
    assert found == (["1"] if how == "one sample" else ["0", "1"])
    assert re.search("ended at its client's wish|Was aborted|deadline had passed", text.splitlines()[-1])
    assert main(["replay", str(path), "--assert"]) == 0


def test_an_unknown_request_is_named(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "nobody", str(trace)]) == 2
    assert "request 'nobody' is none of the 6 in this trace; the first are 'first', 'second'" in capsys.readouterr().err


def test_a_story_names_forks_by_their_ids_and_ends_with_its_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace"
    recorded = Recorded(path)
    recorded.add("mine", [1, 2, 3], max_tokens=9, ignore_eos=True)
    recorded.loop()
    recorded.core.fork(b"client", ForkRequest("mine", "cmpl-child", 0, SamplingParams(max_tokens=40, ignore_eos=True)))
    while "mine" not in recorded.ended:
        recorded.loop()
    recorded.core.reset_prefix_cache()
    recorded.drain()
    recorded.core.close()
    text = why("mine", path, capsys)
    assert "Was forked into cmpl-child." in text
    assert "Finished at its greatest length" in text.splitlines()[-1]
    assert "All that was cached was forgotten." in why("cmpl-child", path, capsys)


def test_every_request_of_a_wild_run_has_a_story(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(6):
        path = tmp_path / f"trace{seed}"
        recorded = Recorded(path, 16, num_host_blocks=9, scheduling_policy="tests.recorded:OddPolicy")
        recorded.random_work(random.Random(seed), 40)
        names = set(recorded.ended) | set(recorded.scheduler.requests)
        recorded.core.close()
        for name in names:
            text = why(name, path, capsys)
            assert text.startswith("+    0.000 s  ")
            if name in recorded.ended:
                assert re.search(r"inished|nded with an error", text)


def test_why_tells_which_tier_a_hit_came_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace"
    recorded = Recorded(path, 12, num_host_blocks=40, max_num_batched_tokens=64)
    prompts = {"first": list(range(1, 33)), "second": list(range(40, 8, -1))}
    for name, prompt in (*prompts.items(), ("again", prompts["first"]), ("at once", prompts["first"])):
        recorded.add(name, prompt, max_tokens=2, ignore_eos=True)
        recorded.drain()
    recorded.core.close()
    text = why("again", path, capsys)
    assert "ound 24 tokens in host memory, which are moved to the device" in text
    assert "with 32 tokens found in the cache" in text
    assert "host memory" not in why("at once", path, capsys)
    assert "host memory" not in why("first", path, capsys)


def recorded_with(path: Path, prompts: list[list[int]], **settings: int) -> Path:
    recorded = Recorded(path, 20, **settings)  # type: ignore[arg-type]
    for number, prompt in enumerate(prompts):
        recorded.add(f"{path.name}-{number}", prompt, max_tokens=4, ignore_eos=True)
        recorded.loop()
    recorded.drain()
    recorded.core.close()
    return path


def test_two_traces_differ_first_where_an_engine_decides_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [[1, 2, 3], list(range(20, 42)), [4, 5]]
    one = recorded_with(tmp_path / "one", prompts)
    same = recorded_with(tmp_path / "same", prompts)
    other = recorded_with(tmp_path / "other", prompts, max_num_batched_tokens=9)
    longer = recorded_with(tmp_path / "longer", [*prompts[:2], [4, 5, 6, 7, 8, 9]])

    def diff(second: Path, *flags: str) -> tuple[int, str]:
        return main(["replay", str(one), "--diff", str(second), *flags]), capsys.readouterr().out

    assert diff(same, "--assert")[0] == 0
    assert re.fullmatch(r"the same decisions in all [1-9]\d* steps\n", diff(same)[1])
    status, out = diff(other, "--assert")
    assert status == 1
    assert "settings differ:\n  max_num_batched_tokens: 16 and 9" in out
    assert "inputs differ" not in out.split("decisions differ first at step 2:")[0]
    first, second = out.splitlines()[-2:]
    assert ("16 tokens" in first, "9 tokens" in second) == (True, True), out
    assert ("one-1 " in first, "other-1 " in second) == (True, True)
    status, out = diff(longer)
    assert status == 0
    assert "inputs differ first before step 4:\n  first:  one-2 arrived with 2 tokens" in out
    assert "second: longer-2 arrived with 6 tokens" in out
    assert "decisions differ first at step 4:" in out
    assert main(["replay", str(one), "--diff", str(same), "--until", "3"]) == 2
    assert main(["replay", str(one), "--diff", str(tmp_path / "none")]) == 2
