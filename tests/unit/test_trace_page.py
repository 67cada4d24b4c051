"""The page of `vllm-lite replay --page` shows the engine at each step, however the trace ends."""

import json
import random
import zlib
from array import array
from base64 import b64decode
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.deadlines import scaled
from tests.examples import examples
from tests.recorded import Recorded, replaced, rewritten
from tests.unit.test_cli_trace import make_trace
from vllm_lite.engine.observe.replay import Replay
from vllm_lite.engine.observe.view import block_bytes, view
from vllm_lite.errors import ProtocolError
from vllm_lite.protocol.stats import Stats
from vllm_lite.server.config import ServeConfig
from vllm_lite.server.live.snapshot import COUNTS, row_of
from vllm_lite.tools.cli import main
from vllm_lite.tools.replay import moments, shown_trace
from vllm_lite.tools.replay.moments import Moments
from vllm_lite.tools.replay.page import app_of
from vllm_lite.tools.replay.shown_trace import ShownTrace
from vllm_lite.tools.replay.timeline import Timeline
from vllm_lite.tools.replay.walk import stats_of
from vllm_lite.trace import records
from vllm_lite.trace.segments import segment_path


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_trace(tmp_path_factory.mktemp("traces") / "trace")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "EVERY", 5)
    monkeypatch.setattr(moments, "SLICE", 3)


def read(path: Path | str) -> ShownTrace:
    """The recording of all of a trace."""
    made = ShownTrace(str(path))
    made.start()
    assert made.wait(scaled(60.0))
    return made


@pytest.fixture
def whole(trace: Path) -> Iterator[ShownTrace]:
    made = read(trace)
    yield made
    made.close()


def engine_at(made: ShownTrace, number: int) -> dict[str, Any]:
    engine = json.loads(json.dumps(made.moment(number)))["engines"]["0"]
    return {**engine, "blocks": b64decode(engine["blocks"]["bytes"])}


def without_times(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Ages are kept as times, which are rounded at the first look; sentences with numbers are tested by themselves."""
    return {key: {name: row[name] for name in row if name not in ("since", "why")} for key, row in rows.items()}


def check_moment(made: ShownTrace, path: Path, number: int, *, sent_again: bool = False) -> None:
    """Compare a moment with a replay that stops there. A request that may have been `sent_again` is as old as at
    first."""
    replay = Replay(str(path)).run(number, lambda each: each.scheduler.in_flight.send(0.0))
    scheduler = replay.scheduler
    seen = view(scheduler, 0, scheduler.meter.now_s)
    stats, shown, moment = stats_of(replay), engine_at(made, number), made.moment(number)
    rows = {row.request_id: row_of(row, replay.wall_s) for row in seen.rows}
    assert without_times(shown["requests"]) == without_times(rows)
    for key, row in rows.items():
        age_s = row["since"] - shown["requests"][key]["since"]
        assert -0.11 < age_s < (100 if sent_again else 0.11)
    assert shown["blocks"] == block_bytes(scheduler.kv, 0, 10**6)
    assert shown["counts"] == {name: getattr(stats, name) for name in COUNTS}
    assert shown["step"]["tokens"] == seen.step_tokens == scheduler.num_scheduled_tokens
    assert shown["step"]["prefill"] == seen.step_prefill <= seen.step_tokens
    assert (moment["step"], moment["is_end"]) == (scheduler.step, False)
    assert moment["time"] == pytest.approx(replay.wall_s, abs=1e-5)
    assert moment["history"][-1]["counts"]["num_waiting"] == stats.num_waiting


def test_each_moment_equals_a_replay_up_to_it(trace: Path, whole: ShownTrace) -> None:
    count = len(whole)
    order = list(range(1, count))  # the last one is the end
    random.Random(3).shuffle(order)
    for number in order:
        check_moment(whole, trace, number)
    end = whole.moment(count)
    assert (end["is_end"], end["engines"]["0"]["requests"], end["step"]) == (True, {}, count - 1)
    assert whole.told()["is_whole"]
    assert whole.trouble == ""


@settings(max_examples=examples(25))
@given(seed=st.integers(0, 2**32), host=st.sampled_from([0, 12]), drafts=st.booleans(), media=st.booleans())
def test_moments_of_random_traces_equal_their_replay(
    tmp_path_factory: pytest.TempPathFactory, seed: int, host: int, drafts: bool, media: bool
) -> None:
    path, rng = tmp_path_factory.mktemp("random") / "trace", random.Random(seed)
    drafting = {"num_speculative_tokens": 3} if drafts else None
    recorded = Recorded(path, 14, num_host_blocks=host, has_media=media, speculative_config=drafting)
    recorded.random_work(rng, 15, death_rate=rng.choice([0.0, 0.1]))
    recorded.core.close()
    made = read(path)
    try:
        assert made.trouble == ""
        assert len(made) == recorded.scheduler.step + 1
        for number in rng.sample(range(1, len(made)), min(5, len(made) - 1)):
            check_moment(made, path, number, sent_again=True)
    finally:
        made.close()


def test_a_request_that_waits_for_blocks_shows_the_numbers(whole: ShownTrace) -> None:
    found = [
        row["why"]
        for number in range(1, len(whole))
        for row in engine_at(whole, number)["requests"].values()
        if row["reason"] == "waits_for_blocks"
    ]
    assert "it needs 6 KV blocks and 3 of 9 are free" in found
    lines = whole.story("third")
    assert lines[0].endswith("Arrived with a prompt of 22 tokens and may grow to 26 in 2 samples.")
    assert lines[-1].endswith("Sample 1 finished at its greatest length after 4 tokens of output.")


def test_a_long_story_is_cut(whole: ShownTrace, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = whole.story("first")
    monkeypatch.setattr(shown_trace, "MAX_SENTENCES", 2)
    assert whole.story("first") == [*lines[:2], f"... and {len(lines) - 2} sentences more (vllm-lite why)"]


@pytest.mark.parametrize("seed", [2, 5])
def test_times_match_the_engine(tmp_path: Path, seed: int) -> None:
    recorded = Recorded(tmp_path / "trace", 14)
    recorded.random_work(random.Random(seed), 30)
    recorded.drain()
    stats = recorded.core.stats()
    recorded.core.close()
    made = read(tmp_path / "trace")
    times = engine_at(made, len(made))["times"]
    assert stats.requests is not None
    for name in ("first_token_s", "queue_s"):
        measured = getattr(stats.requests, name)
        assert times[name] == [pytest.approx(measured.sum, abs=1e-5), sum(measured.counts)]
    made.close()


def test_a_later_life_continues_where_the_first_ended(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    for life, name, blocks in ((1, "old", 20), (2, "new", 9)):
        recorded = Recorded(path, blocks, life=life, launch="launch")
        recorded.clock.now_s += 100 * life
        recorded.add(name, [1, 2, 3, 4, 5], max_tokens=6, ignore_eos=True)
        for _ in range(4):
            recorded.loop()
        recorded.core.close()
    assert Path(segment_path(str(path), 2)).exists()
    made = read(path)
    places = [(made.moment(number)["life"], made.moment(number)["is_end"]) for number in range(1, len(made) + 1)]
    assert places == sorted(places)
    first_end = places.index((1, True)) + 1
    assert set(engine_at(made, first_end)["requests"]) == {"old"}
    assert len(engine_at(made, first_end)["blocks"]) == 20
    assert set(engine_at(made, first_end + 1)["requests"]) == {"new"}
    assert len(engine_at(made, first_end + 1)["blocks"]) == len(engine_at(made, len(made))["blocks"]) == 9
    assert engine_at(made, 1)["requests"].keys() == {"old"}
    made.close()


# ---- traces that are no good


def test_steps_after_a_divergence_are_not_shown(trace: Path) -> None:
    path, _ = rewritten(
        trace, lambda record, step: replaced(record, records.Step, digest=b"12345678") if step == 7 else record
    )
    made = read(path)
    assert len(made) == 6
    assert "this version decides otherwise from step 7 on (another step was made)" in made.trouble
    assert made.told()["trouble"] == made.trouble
    made.close()


def test_a_cut_trace_is_shown_up_to_its_end(trace: Path, whole: ShownTrace, tmp_path: Path) -> None:
    path = tmp_path / "cut"
    path.write_bytes(trace.read_bytes()[:-40])
    made = read(path)
    assert "the trace ends within a record; its writer did not end in peace" in made.trouble
    assert 3 < len(made) <= len(whole)
    assert engine_at(made, 3)["requests"] == engine_at(whole, 3)["requests"]
    made.close()


def test_a_damaged_trace_is_shown_up_to_the_damage(trace: Path, tmp_path: Path) -> None:
    content = bytearray(trace.read_bytes())
    content[len(content) // 2 :] = b"\xff" * (len(content) - len(content) // 2)
    path = tmp_path / "damaged"
    path.write_bytes(content)
    made = read(path)
    assert "damaged, a record" in made.trouble
    assert "\n" not in made.trouble
    assert len(made) > 3
    made.close()


@pytest.mark.parametrize("content", [None, b"", b"no trace", records.MAGIC, records.MAGIC[:-1] + b"\x01", b"\xff" * 99])
def test_invalid_traces_are_refused_in_a_sentence(
    tmp_path: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ProtocolError):
        ShownTrace(str(path))
    for how in (["--page", "--port", "0"], ["--plot", str(tmp_path / "x.png")]):
        assert main(["replay", str(path), *how]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"vllm-lite: {path}: ")
        assert said.count("\n") == 1


def test_an_internal_error_is_shown_on_the_page(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown_trace, "stats_of", lambda _: 1 / 0)
    made = read(trace)
    assert (made.trouble, len(made)) == ("the trace cannot be shown further: ZeroDivisionError('division by zero')", 0)
    assert made.told()["moments"] == 0
    made.close()


@pytest.mark.parametrize("limit", ["MAX_MOMENTS", "MAX_BYTES"])
def test_moments_are_bounded(trace: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(shown_trace, limit, 10)
    made = read(trace)
    assert 5 <= len(made) <= 10
    assert made.trouble == f"only the first {len(made)} moments are shown: there is room for no more"
    assert made.moment(len(made))["step"] == len(made)
    made.close()


def test_closing_ends_the_thread_at_once(trace: Path) -> None:
    made = ShownTrace(str(trace))
    made.close()
    made = ShownTrace(str(trace))
    made.start()
    made.close()
    assert made.wait(0)


def test_a_piece_is_read_once_for_moments_that_follow(whole: ShownTrace, monkeypatch: pytest.MonkeyPatch) -> None:
    read_pieces: list[int] = []

    def decompress(data: bytes) -> bytes:
        read_pieces.append(len(data))
        return zlib.decompress(data)

    monkeypatch.setattr(moments, "zlib", SimpleNamespace(decompress=decompress))
    for number in range(1, 16):
        whole.moment(number)
    assert len(read_pieces) == 3
    for number in (1, 8, 2):
        whole.moment(number)
    assert len(read_pieces) == 6


def test_the_length_counts_no_moment_twice() -> None:
    """The length is read without the lock, so also while a piece is compressed."""
    kept, seen = Moments(), list[int]()

    class Starts(array):  # type: ignore[type-arg]
        def append(self, start: int) -> None:
            seen.append(len(kept))
            super().append(start)
            seen.append(len(kept))

    kept._starts = Starts("Q")
    for _ in range(moments.EVERY):
        kept.add(lambda: {"requests": {}}, {"requests": {}}, b"")
    assert seen == [0, moments.EVERY]
    kept.close()


def test_a_trace_that_ends_while_it_is_described_is_incomplete(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ShownTrace(str(trace))

    def count(_: ShownTrace) -> int:
        made._done.set()
        return 0

    monkeypatch.setattr(ShownTrace, "__len__", count)
    assert not made.told()["is_whole"], "moments may have come since it was counted"
    made.close()


@given(
    st.lists(st.tuples(st.dictionaries(st.sampled_from("ab"), st.integers(0, 3)), st.binary(max_size=9)), max_size=20)
)
def test_moments_come_back_as_they_were(said: list[tuple[dict[str, int], bytes]]) -> None:
    kept = Moments()
    before: dict[str, int] = {}
    for number, (rows, blocks) in enumerate(said):
        changed = dict.fromkeys(before.keys() - rows.keys())
        change = {"number": number, "requests": changed | {key: {"n": value} for key, value in rows.items()}}
        state = {"number": number, "requests": {key: {"n": value} for key, value in rows.items()}}
        kept.add(partial(dict, state), change, blocks)
        before = rows
    for number, (rows, blocks) in reversed(list(enumerate(said))):
        state, found = kept.at(number)
        assert (state["number"], state["requests"]) == (number, {key: {"n": value} for key, value in rows.items()})
        assert found == blocks
    for wrong in (-1, len(said)):
        with pytest.raises(IndexError):
            kept.at(wrong)
    kept.close()


# ---- the timeline


@given(st.lists(st.integers(0, 50), min_size=1, max_size=120), st.integers(2, 9))
def test_a_thinned_timeline_keeps_maxima_and_the_last_values(values: list[int], most: int) -> None:
    timeline, full = Timeline(most), Timeline()
    for number, value in enumerate(values):
        for each in (timeline, full):
            each.add(float(number), Stats(num_running=value, generated_tokens=number))
    assert len(timeline) <= most
    assert len(full) == len(values)
    assert max(timeline.gauges["num_running"]) == max(values)
    assert (timeline.times_s[-1], timeline.generated[-1]) == (len(values) - 1, len(values) - 1)
    assert timeline.stride * (len(timeline) - 1) < len(values) <= timeline.stride * len(timeline)
    ends = [int(time_s) for time_s in timeline.times_s]
    for begin, end, largest in zip([-1, *ends], ends, timeline.gauges["num_running"], strict=False):
        assert largest == max(values[begin + 1 : end + 1])
    shown = full.overview(7)
    assert len(shown["times_s"]) <= 7
    assert max(shown["num_running"]) == max(values)
    assert shown["times_s"][-1] == len(values) - 1


def test_speeds_are_of_tokens_and_seconds() -> None:
    timeline = Timeline()
    for time_s, tokens in ((0.0, 0), (1.0, 10), (1.5, 30), (1.5, 40), (3.0, 0)):
        timeline.add(time_s, Stats(generated_tokens=tokens))
    assert timeline.overview(9)["tokens_per_s"] == [0.0, 10.0, 40.0, 0.0, 0.0]
    assert Timeline().overview(5)["times_s"] == []


# ---- the routes


@pytest.fixture
def http(whole: ShownTrace) -> httpx.AsyncClient:
    app = app_of(whole, ServeConfig.load({"port": 0}))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1:1")


async def test_the_page_is_in_trace_mode(http: httpx.AsyncClient) -> None:
    page = await http.get("/")
    assert 'data-mode="trace"' in page.text
    policy = page.headers["content-security-policy"]
    assert "script-src 'self'; style-src 'self';" in policy
    for part in ("/page.js", "/page.css"):
        assert (await http.get(part)).status_code == 200
    assert (await http.get("/v1/live")).status_code == 404


@pytest.mark.parametrize("path", ["/v1/replay", "/v1/replay/moments/1", "/v1/replay/story?request=first"])
async def test_strangers_see_nothing_of_a_trace(http: httpx.AsyncClient, path: str) -> None:
    assert (await http.get(path)).status_code == 200
    assert (await http.get(path, headers={"sec-fetch-site": "same-origin"})).status_code == 200
    for headers in ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}, {"host": "evil.example"}):
        assert (await http.get(path, headers=headers)).status_code == 403, headers


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("moments/0", 404, "there is no moment 0; 37 have been read so far"),
        ("moments/38", 404, "there is no moment 38"),
        (f"moments/{10**30}", 404, "there is no moment 10000000000000000000;"),
        ("moments/x", 404, "Not Found"),
        ("story?request=nobody", 404, "request 'nobody' is none of the 6 in this trace"),
        ("story", 400, "request must have 1 to 1024 characters"),
        (f"story?request={'x' * 1025}", 400, "request must have 1 to 1024 characters"),
    ],
)
async def test_missing_moments_are_answered_in_a_sentence(
    http: httpx.AsyncClient, path: str, status: int, text: str
) -> None:
    answer = await http.get(f"/v1/replay/{path}")
    assert answer.status_code == status
    assert text in answer.json()["error"]["message"]


# ---- the command


def test_a_figure_is_drawn_of_a_trace(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    place = tmp_path / "new" / "figure.png"
    assert main(["replay", str(trace), "--plot", str(place)]) == 0
    assert f"plot: {place}" in capsys.readouterr().out
    assert place.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--plot", "figure.jpg"], "--plot writes a PNG; its file must end in .png, got 'figure.jpg'"),
        (["--page", "--plot", "x.png"], "--page shows the whole trace; give it without --plot"),
        (["--page", "--assert"], "give it without --assert"),
        (["--page", "--until", "3"], "give it without --until"),
        (["--port", "9"], "--port is where --page listens; give both"),
    ],
)
def test_flags_that_do_not_fit_are_refused(
    trace: Path, flags: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(trace), *flags]) == 2
    said = capsys.readouterr().err
    assert text in said
    assert said.count("\n") == 1


def test_a_port_is_a_number(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["replay", str(trace), "--page", "--port", "65536"])
    assert "must be a number from 0 to 65535, got '65536'" in capsys.readouterr().err
