"""Graphs of decode steps without a GPU: a fake capture keeps the Python calls, and replaying makes them again.

So what a replay sees is what is in the graphs' memory, as on a device; the results must be those of eager steps, bit
for bit. For that every matrix product is made row by row here: their bits would depend on the number of rows.
What CUDA refuses, and what it keeps, is tests/cpu/test_cuda_capture.py's.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import plays
from tests.checkpoints import make_checkpoint
from tests.driver import Driver, make_prompt, new_request
from tests.plays import graphs_of
from vllm_lite.attention.reference import ReferenceBackend
from vllm_lite.attention.step_batch import PAD_SLOT
from vllm_lite.checkpoint.sizing import bucket_sizes, reserved_bytes
from vllm_lite.errors import ConfigError
from vllm_lite.kernels import cpu
from vllm_lite.layers.weights.embedding import LMHead
from vllm_lite.layers.weights.linear import Linear
from vllm_lite.protocol.step import Continue, Draft, Finish
from vllm_lite.worker.batch.step_inputs import StepInputs, padding_step
from vllm_lite.worker.device import Device
from vllm_lite.worker.forward import EagerForward
from vllm_lite.worker.graphs import DecodeGraphs, DecodeInputs, Graph


class FakeGraph:
    def __init__(self, prepare: Callable[[], None], run: Callable[[], None]) -> None:
        self.prepare = prepare  # in place of kernels' reads from memory while they run
        self.run = run
        self.count = 0

    def replay(self) -> None:
        self.count += 1
        self.prepare()
        self.run()


class FakeCapture:
    on_demand = False
    spent_s = 0.0

    def __init__(self) -> None:
        self.graphs: list[FakeGraph] = []

    def __call__(self, prepare: Callable[[], None], run: Callable[[], None]) -> Graph:
        prepare()
        run()
        self.graphs.append(FakeGraph(prepare, run))
        return self.graphs[-1]

    def used_bytes(self) -> int:
        return 0


def with_graphs() -> Device:
    return Device(torch.device("cpu"), capture=FakeCapture())


@pytest.fixture(autouse=True)
def without_native_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the reference serves here, and may: each replay is prepared."""
    if not cpu.available():
        monkeypatch.setattr(ReferenceBackend, "graph_safe", True)


@pytest.fixture
def by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, head = Linear.forward, LMHead.forward

    def linear_rows(self: Linear, x: torch.Tensor, out: torch.Tensor) -> None:
        for row in range(len(x)):
            linear(self, x[row : row + 1], out[row : row + 1])

    def head_rows(self: LMHead, hidden: torch.Tensor, out: torch.Tensor) -> None:
        for row in range(len(hidden)):
            head(self, hidden[row : row + 1], out[row : row + 1])

    monkeypatch.setattr(Linear, "forward", linear_rows)
    monkeypatch.setattr(LMHead, "forward", head_rows)


@pytest.fixture(scope="module", params=["one group", "two groups"])
def model(request: pytest.FixtureRequest, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "one group":
        return tiny_checkpoint
    folder = tmp_path_factory.mktemp("graphs") / "mixed"
    return make_checkpoint(folder, "qwen3", use_sliding_window=True, sliding_window=11, max_window_layers=1)


# ---- the same bits


def run_both(
    model: Path, seed: int, num_steps: int, on: Device | None = None, **settings: Any
) -> tuple[Driver, Driver]:
    """plays.run_both with a fake capture."""
    return plays.run_both(model, seed, num_steps, on or with_graphs(), **settings)


@pytest.mark.usefixtures("by_row")
@pytest.mark.parametrize("sizes", [None, [1, 3], [8]], ids=str)
def test_replayed_steps_have_the_bits_of_eager_ones(model: Path, sizes: list[int] | None) -> None:
    _, graphed = run_both(model, seed=1, num_steps=120, cudagraph_capture_sizes=sizes)
    graphs = graphs_of(graphed)
    assert graphs.num_replays > 30
    assert len(graphed.worker.device.capture.graphs) == len(graphs.sizes)  # type: ignore[union-attr]


@pytest.mark.usefixtures("by_row")
@pytest.mark.parametrize("what", ["slots", "seq_lens", "tables", "rows", "ids"])
def test_memory_that_is_not_brought_up_to_date_shows(
    tiny_checkpoint: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control: the test fails for each part of a graph's inputs that is not updated."""
    load = DecodeInputs.load

    def forgetful(self: DecodeInputs, inputs: StepInputs | None, size: int) -> None:
        rows, seq_lens = self.views(size)
        parts = {"slots": rows[2:], "seq_lens": seq_lens, "tables": self.tables[0], "ids": rows[:1], "rows": rows}
        stale = parts[what].clone()
        load(self, inputs, size)
        if inputs is not None:
            parts[what].copy_(stale)

    monkeypatch.setattr(DecodeInputs, "load", forgetful)
    with pytest.raises((AssertionError, IndexError)):
        run_both(tiny_checkpoint, seed=1, num_steps=120)


@pytest.mark.usefixtures("by_row")
def test_padding_of_a_larger_step_before_is_overwritten(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise rows of ended sequences would still write to blocks that others have by now."""
    driver = Driver(tiny_checkpoint, on=with_graphs(), cudagraph_capture_sizes=[8])
    for handle in range(6):
        driver.run(new_request(handle, make_prompt(5, seed=handle), [1 + handle]))
    driver.decode(*range(6), count=2)
    driver.run(*(Finish(handle) for handle in range(1, 6)))
    driver.pool[2:].fill_(7.0)
    driver.decode(0, count=3)
    assert (driver.pool[2:] == 7.0).all()
    rows, seq_lens = graphs_of(driver)._inputs.views(8)
    assert rows[:, 1:].tolist() == [[0] * 7, [0] * 7, [PAD_SLOT] * 7]
    assert seq_lens[1:].tolist() == [0] * 7
    assert graphs_of(driver).num_replays >= 5


# ---- which steps are replayed


def counts(driver: Driver) -> dict[int, int]:
    """Replays of each size."""
    return {bucket.size: bucket.graph.count for bucket in graphs_of(driver).buckets.values()}  # type: ignore[attr-defined]


def test_each_step_takes_the_smallest_bucket_that_holds_it(tiny_checkpoint: Path) -> None:
    driver = Driver(tiny_checkpoint, on=with_graphs(), cudagraph_capture_sizes=[1, 2, 4])
    assert counts(driver) == {1: 0, 2: 0, 4: 0}
    for handle in range(5):
        driver.run(new_request(handle, make_prompt(5, seed=handle), [1 + handle]))
    assert counts(driver) == {1: 0, 2: 0, 4: 0}, "prompts are not replayed"
    for num_seqs in (1, 2, 3, 4, 5):
        driver.decode(*range(num_seqs), count=1)
    assert counts(driver) == {1: 1, 2: 1, 4: 2}, "five sequences are more than the largest bucket"
    driver.run(Continue(0, 1, []), new_request(7, make_prompt(2), [9]))
    assert counts(driver) == {1: 1, 2: 1, 4: 2}, "a prompt among decodes"


def test_a_step_with_drafts_is_not_replayed(tiny_checkpoint: Path) -> None:
    settings: dict[str, Any] = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}
    driver = Driver(tiny_checkpoint, on=with_graphs(), cudagraph_capture_sizes=[4], **settings)
    driver.run(new_request(0, [5, 6, 7, 5, 6, 7, 5, 6], [1]))
    driver.worker.runner.batch.tokens_of(0)[-1] = 7  # follows its own pattern, so that there is something to draft
    tried = counts(driver)[4]  # the timed steps at the start
    driver.run(Draft(0, 2, []))
    assert counts(driver) == {4: tried}
    driver.run(Continue(0, 1, []))
    assert counts(driver) == {4: tried + 1}


def test_a_row_that_does_not_sample_is_left_out(tiny_checkpoint: Path) -> None:
    """A prompt's chunk of one token beside a decoding sequence: two rows, one token."""
    eager, graphed = Driver(tiny_checkpoint, enforce_eager=True), Driver(tiny_checkpoint, on=with_graphs())
    for driver in (eager, graphed):
        driver.run(new_request(0, make_prompt(9), [1]))
        driver.run(new_request(1, make_prompt(4, seed=2), [2], num_tokens=2))
        driver.run(Continue(1, 1, []), Continue(0, 1, []))
        driver.decode(0, 1, count=3)
    assert eager.got == graphed.got
    assert graphs_of(graphed).num_replays == 4


def test_the_largest_is_captured_first(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []
    capture = DecodeGraphs._capture

    def recorded(self: DecodeGraphs, size: int) -> Any:
        order.append(size)
        return capture(self, size)

    monkeypatch.setattr(DecodeGraphs, "_capture", recorded)
    driver = Driver(tiny_checkpoint, on=with_graphs(), cudagraph_capture_sizes=[4, 1, 2])
    assert order == [4, 2, 1]
    assert driver.progress.count >= 3


def test_capturing_writes_nothing(tiny_checkpoint: Path) -> None:
    driver = Driver(tiny_checkpoint, on=with_graphs())
    driver.pool.normal_()
    before = driver.pool.clone()
    graphs_of(driver).capture_all()
    assert torch.equal(driver.pool, before)
    driver.pool[0] = 0


def test_without_capture_steps_are_eager(tiny_checkpoint: Path) -> None:
    driver = Driver(tiny_checkpoint, enforce_eager=True)
    assert isinstance(driver.worker.runner.forward, EagerForward)
    assert driver.worker.graph_sizes == ()


# ---- sizes


@pytest.mark.parametrize(
    ("max_rows", "wanted", "largest", "sizes"),
    [
        (1, None, None, (1,)),
        (3, None, None, (1, 2, 3)),
        (8, None, None, (1, 2, 4, 8)),
        (40, None, None, (1, 2, 4, 8, 16, 24, 32, 40)),
        (40, None, 20, (1, 2, 4, 8, 16, 20)),
        (40, [64, 3, 3, 40], None, (3, 40)),
        (40, [64, 3], 30, (3,)),
    ],
)
def test_bucket_sizes(max_rows: int, wanted: list[int] | None, largest: int | None, sizes: tuple[int, ...]) -> None:
    assert bucket_sizes(max_rows, wanted, largest) == sizes


def test_bucket_sizes_of_a_large_batch() -> None:
    sizes = bucket_sizes(4096)
    assert (sizes[0], sizes[-1], len(sizes)) == (1, 512, 3 + 31 + 16 + 1)
    assert sizes == tuple(sorted(set(sizes)))
    assert 248 in sizes
    assert 256 in sizes
    assert 264 not in sizes
    assert 272 in sizes


def test_sizes_that_no_step_has_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"at most 8 .*got 16, 32"):
        bucket_sizes(8, [16, 32])


def test_reserved_bytes_cover_buffers_and_graph_pools() -> None:
    assert reserved_bytes((), 1000, 10, 1) == 0
    one = reserved_bytes((4,), 1000, 10, 1)
    assert one == 4 * (1000 * 8 + 48 + 20) + (8 << 20)
    assert reserved_bytes((1, 4), 1000, 10, 1) == one + (8 << 20)
    assert reserved_bytes((4,), 1000, 10, 1, num_in_pieces=7) == one + 7 * (8 << 20)


# ---- the memory of a graph


def test_inputs_are_where_the_views_say() -> None:
    inputs = DecodeInputs(8, 5, 2, torch.device("cpu"))
    step = padding_step(3, 3, 2, 16, num_sampling=3)
    step.input_ids[:], step.positions[:], step.seq_lens[:] = [11, 12, 13], [1, 2, 3], [2, 3, 4]
    slots, tables = (
        np.array([[5, 6, 7], [8, 9, PAD_SLOT]]),
        [np.full((3, 2), 21, np.int32), np.full((3, 1), 31, np.int32)],
    )
    object.__setattr__(step, "slot_mapping", tuple(slots))
    object.__setattr__(step, "block_tables", tuple(tables))
    inputs.load(step, 4)
    batch = inputs.batch(4, 99)
    rows, _ = inputs.views(4)
    assert rows[:2].tolist() == [[11, 12, 13, 0], [1, 2, 3, 0]]
    assert [slots.tolist() for slots in batch.slot_mapping] == [[5, 6, 7, PAD_SLOT], [8, 9, PAD_SLOT, PAD_SLOT]]
    assert batch.seq_lens.tolist() == [2, 3, 4, 0]
    assert batch.query_start_loc.tolist() == [0, 1, 2, 3, 4]
    assert (batch.num_tokens, batch.num_seqs, batch.max_query_len, batch.max_seq_len) == (4, 4, 1, 99)
    assert [table.shape for table in batch.block_tables] == [(4, 5), (4, 5)]
    assert batch.block_tables[0][:3, :2].eq(21).all()
    assert batch.block_tables[1][:3, 0].eq(31).all()
    assert [tensor.dtype for tensor in (batch.seq_lens, batch.query_start_loc, batch.slot_mapping[1])] == [
        torch.int32,
        torch.int32,
        torch.int64,
    ]


def test_a_bucket_keeps_its_addresses() -> None:
    """A graph has fixed addresses, so `load` must not make new tensors."""
    inputs = DecodeInputs(8, 5, 1, torch.device("cpu"))
    before = inputs.batch(4, 9)
    inputs.load(padding_step(3, 3, 1, 16, num_sampling=3), 4)
    after = inputs.batch(4, 9)
    for one, other in zip(
        (before.seq_lens, before.slot_mapping[0], before.block_tables[0], before.query_start_loc),
        (after.seq_lens, after.slot_mapping[0], after.block_tables[0], after.query_start_loc),
        strict=True,
    ):
        assert one.data_ptr() == other.data_ptr()
        assert one.is_contiguous()
