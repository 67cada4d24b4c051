"""Steps in pieces under a capture of CUDA's kind: the bits of eager steps, with fewer launches."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import plays
from tests.checkpoints import make_checkpoint
from tests.cuda_capture import CapturingLauncher, CudaLikeCapture
from tests.driver import Driver, make_prompt, new_request
from tests.kernels import emulator
from tests.plays import graphs_of
from vllm_lite.attention import cuda as cuda_module
from vllm_lite.attention.cuda import CudaBackend
from vllm_lite.attention.step_batch import StepBatch
from vllm_lite.checkpoint.sizing import piece_sizes
from vllm_lite.kernels import select
from vllm_lite.kernels.cuda.attention.prefill_table import PrefillTable
from vllm_lite.kernels.cuda.attention.torch_prefill import torch_prefill
from vllm_lite.kernels.cuda.fused import CudaOps
from vllm_lite.layers.weights import gpu_matmul
from vllm_lite.layers.weights.matmul import DenseMatmul
from vllm_lite.protocol.step import Continue
from vllm_lite.worker import pieces as pieces_module
from vllm_lite.worker import worker as worker_module
from vllm_lite.worker.device import Device
from vllm_lite.worker.pieces import PiecewiseForward

pytestmark = [
    pytest.mark.skipif(emulator.available() is None, reason="no C++ compiler for the emulator"),
    pytest.mark.usefixtures("as_on_a_gpu"),
]
CPU = torch.device("cpu")
NUM_LAYERS = 2


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> CapturingLauncher:
    """A launcher like a GPU's, and dense products that are rounded once at the end, so that their bits do not depend on
    other rows."""
    launcher = CapturingLauncher(emulator.EmulatorLauncher())

    def forward(self: DenseMatmul, x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(torch.nn.functional.linear(x.double(), self.weight.double()))

    monkeypatch.setattr(DenseMatmul, "forward", forward)
    monkeypatch.setattr(select, "TorchOps", lambda: CudaOps(launcher))
    monkeypatch.setattr(gpu_matmul, "launcher_for", lambda dtype, _: launcher if dtype in gpu_matmul.DTYPES else None)
    monkeypatch.setattr(worker_module, "select_backend", lambda shape, _: CudaBackend(shape, launcher))
    monkeypatch.setattr(worker_module, "piece_sizes", lambda most, _: tuple(n for n in (8, 32) if n <= most))
    return launcher


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pieces") / "model"
    return make_checkpoint(folder, "qwen3", num_hidden_layers=NUM_LAYERS, dtype="bfloat16")


def pieces_of(driver: Driver) -> PiecewiseForward:
    pieces = graphs_of(driver).other
    assert isinstance(pieces, PiecewiseForward)
    return pieces


def test_a_step_in_pieces_has_the_bits_of_an_eager_step(model: Path, launcher: CapturingLauncher) -> None:
    """Chunks of several prompts beside decodes, padded; steps too large for the pieces stay eager."""
    capture = CudaLikeCapture()
    settings: dict[str, Any] = {"dtype": "bfloat16", "cudagraph_capture_sizes": [2]}
    _, graphed = plays.run_both(model, 3, 30, Device(CPU, capture=capture), **settings)
    assert pieces_of(graphed).num_replays > 8
    assert [len(pieces) for pieces in capture.piecewise] == [NUM_LAYERS + 1] * 2
    assert all(graph.num_launches for pieces in capture.piecewise for graph in pieces)


class Everything(PrefillTable):
    """Sends all prompts that come whole through a library."""

    def ways(self, dtype: torch.dtype, head_size: int, group: int) -> list[tuple[int, str | None]]:
        del dtype, head_size, group
        return [(2, "flash")]


def test_prompts_in_pieces_go_through_a_library_as_in_eager_steps(
    model: Path, launcher: CapturingLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library reads K and V that a piece has just written. The last layer of an eager step attends for no row if
    none is wanted."""
    counts: list[int] = []
    expected: list[int] = []

    class Counting(CudaBackend):
        def prepare(self, batch: StepBatch) -> None:
            super().prepare(batch)
            if any(batch.plan.fresh):
                expected.append(NUM_LAYERS - (batch.wanted is not None and len(batch.wanted) == 0))

    monkeypatch.setattr(worker_module, "select_backend", lambda shape, _: Counting(shape, launcher, Everything()))

    def counted(*given: Any) -> None:
        counts.append(sum(prompts.num_prompts for prompts in given[4]))
        torch_prefill(*given)

    monkeypatch.setattr(cuda_module, "torch_prefill", counted)
    settings: dict[str, Any] = {"dtype": "bfloat16", "cudagraph_capture_sizes": [2]}
    _, graphed = plays.run_both(model, 3, 30, Device(CPU, capture=CudaLikeCapture()), **settings)
    assert pieces_of(graphed).num_replays > 8
    assert len(counts) > 4 * NUM_LAYERS
    assert len(counts) == sum(expected)


def test_a_mixed_step_launches_less(
    model: Path, launcher: CapturingLauncher, monkeypatch: pytest.MonkeyPatch, record_property: Callable[..., None]
) -> None:
    """The host launches one graph, and attention's kernels, a layer for a chunk beside a decode."""
    counts = []
    for eager in (True, False):
        capture = CudaLikeCapture()
        driver = Driver(model, on=Device(CPU, capture=None if eager else capture), dtype="bfloat16")
        driver.run(new_request(0, make_prompt(20), [1, 2]))
        launched = count_launches(monkeypatch)
        before = sum(graph.count for pieces in capture.piecewise for graph in pieces)
        driver.run(Continue(0, 1, []), new_request(1, make_prompt(9), [3]))
        replays = sum(graph.count for pieces in capture.piecewise for graph in pieces) - before
        counts.append(len(launched) + replays)
    whole, pieces = counts
    attention = 2 * NUM_LAYERS  # decode and prefill
    assert pieces == attention + NUM_LAYERS + 1
    # Two norms, an activation and the write to the cache; torch's four products of a layer come on top.
    assert whole == attention + 4 * NUM_LAYERS + 1
    record_property("launches", counts)


def count_launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels of the launcher that are launched from now on, and not replayed."""
    launched: list[str] = []
    kernel = CapturingLauncher.kernel

    def noted(own: CapturingLauncher, source: str, name: str) -> Callable[..., None]:
        made = kernel(own, source, name)

        def launch(*args: Any, **kwargs: Any) -> None:
            launched.append(name)
            made(*args, **kwargs)

        return launch

    monkeypatch.setattr(CapturingLauncher, "kernel", noted)
    return launched


def test_padding_is_not_kept(model: Path, launcher: CapturingLauncher) -> None:
    """A small step after a large one: its padding has the place of rows of the large step."""
    driver = Driver(model, on=Device(CPU, capture=CudaLikeCapture()), dtype="bfloat16", enforce_eager=False)
    driver.run(new_request(0, make_prompt(30), [1, 2]))
    before = driver.pool.clone()
    driver.run(new_request(1, make_prompt(9), [3]))
    assert pieces_of(driver).num_replays == 2
    changed = (driver.pool != before).flatten(1).any(1)
    assert torch.nonzero(changed).flatten().tolist() == [3]


@pytest.mark.parametrize(
    ("most", "wanted", "sizes"),
    [
        (32, None, ()),
        (64, None, (64,)),
        (600, None, (64, 128, 256, 384, 512)),
        (8192, None, (64, 128, 256, 384, 512, 768, 1024)),
        (8192, (2048, 100, 2048), (100, 2048)),
        (1024, (2048, 100), (100,)),
        (8192, (0,), ()),
    ],
)
def test_the_sizes(most: int, wanted: tuple[int, ...] | None, sizes: tuple[int, ...]) -> None:
    assert piece_sizes(most, wanted) == sizes


def test_a_step_is_not_padded_by_more_than_it_has(model: Path, launcher: CapturingLauncher) -> None:
    """But up to 256 tokens, where a GPU waits for the weights anyway."""
    pieces = PiecewiseForward.__new__(PiecewiseForward)
    pieces.sizes = (64, 256, 1024, 2000)
    given = (1, 64, 65, 256, 257, 511, 512, 1024, 1025, 2000, 2001)
    assert [pieces.size_of(count) for count in given] == [64, 64, 256, 256, None, None, 1024, 1024, 2000, 2000, None]


def test_a_start_does_not_wait_long_for_captures(
    model: Path, launcher: CapturingLauncher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The largest captures are made first and are used; small steps run eagerly if they would need too much padding."""
    monkeypatch.setattr(pieces_module, "MOST_S", 0.0)
    capture = CudaLikeCapture()
    with caplog.at_level("INFO", logger=pieces_module.logger.name):
        driver = Driver(model, on=Device(CPU, capture=capture), dtype="bfloat16", enforce_eager=False)
    assert pieces_of(driver).sizes == (32,)
    assert [len(pieces) for pieces in capture.piecewise] == [NUM_LAYERS + 1]
    assert "prompts of up to 8 tokens have no graphs" in caplog.text
    assert "--cudagraph-piece-sizes 32 asks for less" in caplog.text
    assert f"{NUM_LAYERS + 1} graphs in pieces, " in caplog.text


def test_no_pieces_are_wanted(model: Path, launcher: CapturingLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "piece_sizes", piece_sizes)
    capture = CudaLikeCapture()
    driver = Driver(model, on=Device(CPU, capture=capture), dtype="bfloat16", cudagraph_piece_sizes=[0])
    assert capture.piecewise == []
    assert graphs_of(driver).other is driver.worker.runner.eager


def test_with_adapters_there_are_no_pieces(model: Path, launcher: CapturingLauncher) -> None:
    capture = CudaLikeCapture()
    driver = Driver(model, on=Device(CPU, capture=capture), dtype="bfloat16", enable_lora=True)
    assert capture.piecewise == []
    assert graphs_of(driver).other is driver.worker.runner.eager


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_counted_choices_of_the_last_layer(model: Path, launcher: CapturingLauncher, eager: bool) -> None:
    """Graphs pass all rows through the last layer, eager steps only the wanted ones; as many choices of experts are
    counted."""
    counted: list[tuple[int, int]] = []
    capture = None if eager else CudaLikeCapture()
    driver = Driver(model, on=Device(CPU, capture=capture), dtype="bfloat16", cudagraph_capture_sizes=[2])
    runner = driver.worker.runner
    runner.after_sample.append(lambda inputs, _result: counted.append((inputs.num_tokens, runner.eager.num_last)))
    driver.run(new_request(0, make_prompt(20), [1, 2]))
    driver.run(Continue(0, 1, []), new_request(1, make_prompt(9), [3]))
    driver.run(Continue(0, 1, []), Continue(1, 1, []))
    assert counted == ([(20, 1), (10, 2), (2, 2)] if eager else [(20, 20), (10, 10), (2, 2)])
