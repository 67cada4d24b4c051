"""Every attention backend under a capture of CUDA's kind: one that may be captured gives the bits of eager steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import plays
from tests.checkpoints import make_checkpoint
from tests.cpu.test_gpu_matmul import linears
from tests.cpu.test_quantized_families import VARIANTS as MIXTURES
from tests.cuda_capture import CaptureError, CapturingLauncher, CudaLikeCapture
from tests.driver import Driver, make_prompt, new_request
from tests.families.hybrid import VARIANTS as HYBRIDS
from tests.kernels import emulator
from tests.kernels.emulator import EmulatedKernel
from tests.plays import graphs_of
from vllm_lite.attention.backend import AttentionBackend, AttentionShape
from vllm_lite.attention.cuda import CudaBackend
from vllm_lite.attention.paged import PagedBackend
from vllm_lite.attention.reference import ReferenceBackend
from vllm_lite.attention.select import BACKENDS
from vllm_lite.kernels import select
from vllm_lite.kernels.cuda.attention import shared_prefix
from vllm_lite.kernels.cuda.attention.shared_prefix import Worth
from vllm_lite.kernels.cuda.fused import CudaOps
from vllm_lite.kernels.cuda.moe.packed_experts import GpuPackedExperts
from vllm_lite.kernels.cuda.weights import packed_linear
from vllm_lite.kernels.cuda.weights.packed_linear import PackedLinear
from vllm_lite.layers.moe.expert_matmul import LoopedExperts
from vllm_lite.layers.weights import gpu_matmul
from vllm_lite.layers.weights.matmul import DenseMatmul
from vllm_lite.protocol.step import Continue, Finish, States
from vllm_lite.worker import worker as worker_module
from vllm_lite.worker.device import Device
from vllm_lite.worker.forward import EagerForward

pytestmark = [
    pytest.mark.skipif(emulator.available() is None, reason="no C++ compiler for the emulator"),
    pytest.mark.usefixtures("exact_products", "as_on_a_gpu"),
]
CPU = torch.device("cpu")


@pytest.fixture
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense products that are rounded once, at the end, so their bits depend neither on other rows nor on addresses."""

    def forward(self: DenseMatmul, x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(torch.nn.functional.linear(x.double(), self.weight.double()))

    monkeypatch.setattr(DenseMatmul, "forward", forward)


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch, as_on_a_gpu: None) -> CapturingLauncher:
    """Launcher as on a GPU: kernels for small operations and packed weights, torch for all else."""
    launcher = CapturingLauncher(emulator.EmulatorLauncher())
    monkeypatch.setattr(select, "TorchOps", lambda: CudaOps(launcher))
    monkeypatch.setattr(gpu_matmul, "launcher_for", lambda dtype, _: launcher if dtype in gpu_matmul.DTYPES else None)
    return launcher


@pytest.fixture
def backends(launcher: CapturingLauncher) -> dict[str, Callable[[AttentionShape], AttentionBackend]]:
    """Backends that serve a GPU, by their names."""
    return {
        "cuda": lambda shape: CudaBackend(shape, launcher),
        "paged": lambda shape: PagedBackend(shape, launcher),
        "reference": ReferenceBackend,
    }


@pytest.fixture
def serve_by(monkeypatch: pytest.MonkeyPatch, backends: dict[str, Any]) -> Callable[[str], None]:
    def choose(name: str) -> None:
        monkeypatch.setattr(worker_module, "select_backend", lambda shape, _override: backends[name](shape))

    return choose


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head size that all backends have."""
    return make_checkpoint(tmp_path_factory.mktemp("capture") / "model", num_hidden_layers=1, head_dim=32)


def test_every_backend_for_a_gpu_is_here(backends: dict[str, Any]) -> None:
    others = {"cpu", "encoder"}  # tests/cpu/test_program.py has the programs of a CPU; encoders do not decode
    assert set(backends) == set(BACKENDS) - others


@pytest.mark.parametrize(
    ("dtype", "quantization"), [("float32", None), ("bfloat16", "int8"), ("bfloat16", "int4")], ids=str
)
def test_a_replay_has_the_bits_of_an_eager_step(
    tmp_path: Path,
    dtype: str,
    quantization: str | None,
    serve_by: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels see the lengths, tables and slots of each step although they were launched, once, for none."""
    # Products of more rows go through torch and have other bits: padding may cross that bound.
    monkeypatch.setattr(packed_linear, "FEW_ROWS", 1 << 20)
    serve_by("cuda")
    model = make_checkpoint(tmp_path / "model", dtype=dtype, num_hidden_layers=1, max_position_embeddings=1024)
    capture = CudaLikeCapture()
    settings = {"dtype": dtype, "quantization": quantization, "cudagraph_capture_sizes": [2, 8]}
    _, graphed = plays.run_both(model, 2, 24, Device(CPU, capture=capture), **settings)
    assert graphs_of(graphed).num_replays > 8
    assert all(graph.count and graph.num_launches > 4 for graph in capture.graphs)
    if quantization is not None:
        assert {type(each) for each in linears(graphed.worker.model)} == {PackedLinear}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_experts_that_stay_packed_are_in_graphs(
    dtype: str, tmp_path: Path, serve_by: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed experts do not wait on the host. Without kernels, as for rows of 32 bits, they are a loop that does."""
    monkeypatch.setattr(packed_linear, "FEW_ROWS", 1 << 20)
    said: list[str] = []
    monkeypatch.setattr(worker_module.logger, "warning", lambda text, *values: said.append(text % values))
    serve_by("cuda")
    monkeypatch.setattr(worker_module, "launcher_for", gpu_matmul.launcher_for)
    path = next(each for each in MIXTURES if each.name == "qwen3-moe").make(tmp_path / "model")
    settings: dict[str, Any] = {"dtype": dtype, "quantization": "int8", "cudagraph_capture_sizes": [2, 8]}
    _, graphed = plays.run_both(path, 2, 24, Device(CPU, capture=CudaLikeCapture()), **settings)
    made = {type(layer.mlp.experts.matmul) for layer in graphed.worker.model.layers}  # type: ignore[attr-defined]
    if dtype == "float32":
        assert made == {LoopedExperts}
        assert said == ["decode steps run without graphs: a loop over experts of int8 waits"]
        return
    assert made == {GpuPackedExperts}
    assert graphs_of(graphed).num_replays > 8
    assert said == []


def test_the_norms_of_heads_go_with_their_rotation(
    tmp_path: Path, launcher: CapturingLauncher, serve_by: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One launch instead of three, in every layer with its own weights, and the same bits."""
    serve_by("cuda")
    model = make_checkpoint(tmp_path / "model", "qwen3", dtype="bfloat16", num_hidden_layers=2)
    tokens: list[tuple[dict[int, list[int]], torch.Tensor]] = []
    names: list[str] = []
    kernel = CapturingLauncher.kernel

    def noted(own: CapturingLauncher, source: str, name: str) -> Callable[..., None]:
        names.append(name)
        return kernel(own, source, name)

    monkeypatch.setattr(CapturingLauncher, "kernel", noted)
    for fuses in (True, False):
        monkeypatch.setattr(CudaBackend, "fuses_norms", fuses)
        names.clear()
        driver = Driver(model, enforce_eager=True, on=Device(CPU), dtype="bfloat16")
        driver.run(new_request(0, make_prompt(20), [1, 2, 3]))
        driver.decode(0, count=3)
        tokens.append((driver.got, driver.pool.clone()))
        assert any(name.startswith("norm_rope_and_cache<") for name in names) == fuses
    assert tokens[0][0] == tokens[1][0]
    assert torch.equal(tokens[0][1], tokens[1][1])


def eight_that_begin_alike(model: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[Any, int, list[int]]:
    """Return their tokens (the last steps have one sequence less), the number of launches of cascade_attention, and the
    numbers of splits that eight and seven of them share in a graph."""
    on = Device(CPU, capture=None if settings else CudaLikeCapture())
    given: dict[str, Any] = {
        "dtype": "bfloat16",
        "block_size": 64,
        "cudagraph_capture_sizes": [8],
        "cudagraph_piece_sizes": [0],
    }
    driver = Driver(model, on=on, **given, **settings)
    random, pool = torch.Generator().manual_seed(0), driver.pool[1:17]
    pool[:] = torch.randn(pool.numel() // 2, generator=random).bfloat16().view(torch.uint8).view(pool.shape)
    names: list[str] = []
    launch = EmulatedKernel.__call__

    def noted(own: EmulatedKernel, *args: Any) -> None:
        names.append(own._name)
        launch(own, *args)

    cached = {"num_computed": 1024, "num_cached": 1024, "num_tokens": 2}
    with monkeypatch.context() as patched:
        patched.setattr(EmulatedKernel, "__call__", noted)
        driver.run(
            *(
                new_request(handle, [*make_prompt(1024), 5 + handle, 7], [*range(1, 17), 17 + handle], **cached)
                for handle in range(8)
            )
        )
        driver.decode(*range(8), count=3)
        shared = [shared_in_graph(driver)]
        driver.run(Finish(7), *(Continue(handle, 1, []) for handle in range(7)))
        driver.decode(*range(7), count=1)
        shared.append(shared_in_graph(driver))
    return driver.got, sum(name.startswith("cascade_attention<") for name in names), shared


def shared_in_graph(driver: Driver) -> int:
    if driver.worker.graph_sizes == ():
        return 0
    (bucket,) = graphs_of(driver).buckets.values()
    return int(bucket.batch.plan.decodes[0].splits[0, 1])


def test_a_common_prefix_of_sequences_is_read_once(
    tmp_path: Path, serve_by: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are the same in a graph, eagerly, and for each sequence alone."""
    serve_by("cuda")
    monkeypatch.setattr(shared_prefix, "WORTH", Worth(saved_blocks=1))
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "max_position_embeddings": 2048, "head_dim": 32}
    model = make_checkpoint(tmp_path / "model", dtype="bfloat16", **sizes)
    graphed, in_graphs, shared = eight_that_begin_alike(model, monkeypatch)
    eager, launched, _ = eight_that_begin_alike(model, monkeypatch, enforce_eager=True)
    plain, never, _ = eight_that_begin_alike(model, monkeypatch, enforce_eager=True, disable_cascade_attn=True)
    assert graphed == eager == plain
    assert launched == 4, "7 are too few"
    assert in_graphs == 6, "the prompts' step is eager, and 5 replays have the launch, two of them with nothing to do"
    assert shared == [4, 0]
    assert never == 0


@pytest.mark.parametrize("name", ["qwen3.5", "granite-hybrid", "lfm2", "nemotron-h"])
def test_recurrent_layers_are_in_graphs(
    name: str,
    tmp_path: Path,
    launcher: CapturingLauncher,
    serve_by: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With their kernels they give the same tokens and states as eager steps and plain torch, bit for bit."""
    serve_by("cuda")
    path = next(each for each in HYBRIDS if each.name == name).make(tmp_path / "model")
    arrivals = [
        entry
        for handle in range(3)
        for entry in (
            new_request(handle, [7 + handle, *range(1, 9)], [2 * handle + 1, 2 * handle + 2]),
            States(handle, 0, 1 + handle, []),
        )
    ]
    drivers: list[Driver] = []
    for has_kernels, eager in ((False, True), (True, True), (True, False)):
        monkeypatch.setattr(select, "launcher_of", lambda _: launcher if has_kernels else None)  # noqa: B023
        on = Device(CPU, capture=CudaLikeCapture())
        drivers.append(driver := Driver(path, enforce_eager=eager, on=on, cudagraph_capture_sizes=[2, 4]))
        driver.run(*arrivals)
        driver.decode(0, 1, 2, count=3)
        driver.run(States(1, 2, 5, []), Continue(0, 1, []), Continue(1, 1, []))
        driver.run(Finish(0), Continue(1, 1, []))
    plain, own, graphed = drivers
    assert graphs_of(graphed).num_replays == 5
    assert own.got == graphed.got == plain.got
    states = [driver.worker.runner.cache_engine.states for driver in drivers]
    assert torch.equal(states[1], states[2])
    torch.testing.assert_close(states[1], states[0], atol=1e-4, rtol=1e-4)
    assert states[0][5].any()


@pytest.mark.parametrize("name", ["paged", "reference"])
def test_a_backend_that_is_not_graph_safe_is_not_captured(
    model: Path, name: str, serve_by: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_by(name)
    said: list[str] = []
    monkeypatch.setattr(worker_module.logger, "warning", lambda text, *values: said.append(text % values))
    capture = CudaLikeCapture()
    _, graphed = plays.run_both(model, 2, 6, Device(CPU, capture=capture))
    assert capture.graphs == []
    assert (graphed.worker.graph_sizes, type(graphed.worker.runner.forward)) == ((), EagerForward)
    assert said == [f"decode steps run without graphs: {name.title()}Backend is not graph-safe"]


@pytest.mark.parametrize("backend", [PagedBackend, ReferenceBackend])
def test_capturing_an_unsafe_backend_gives_wrong_tokens(
    model: Path, backend: type[Any], serve_by: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: with values that Python prepared for another step, or read from the device, tokens are wrong."""
    serve_by(backend.__name__.removesuffix("Backend").lower())
    monkeypatch.setattr(backend, "graph_safe", True)
    monkeypatch.setattr(worker_module, "piece_sizes", lambda *_: ())  # decode graphs alone
    with pytest.raises((AssertionError, CaptureError)):
        plays.run_both(model, 2, 40, Device(CPU, capture=CudaLikeCapture()))


# ---- the fake itself


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.tolist(),
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x.numpy(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
    ],
    ids=["tolist", "item", "bool", "numpy", "mask", "nonzero"],
)
def test_a_capture_refuses_to_read_from_the_device(read: Callable[[torch.Tensor], Any]) -> None:
    x = torch.ones(3)
    state: list[bool] = []

    def run() -> None:
        if state:  # the first call is outside of the capture
            read(x)
        state.append(True)

    with pytest.raises(CaptureError, match="waits for the device"):
        CudaLikeCapture()(lambda: None, run)


def test_python_does_not_run_again_and_addresses_stay(launcher: CapturingLauncher) -> None:
    x, out, calls = torch.zeros(4, 8), torch.zeros(4, 8), []

    def run() -> None:
        calls.append(1)
        doubled = x * 2
        CudaOps(launcher).rms_norm(doubled + 1, torch.ones(8), 1e-6, out)

    graph = CudaLikeCapture()(lambda: None, run)
    x.copy_(torch.arange(32.0).view(4, 8))
    graph.replay()
    assert len(calls) == 2
    assert torch.allclose(out, torch.nn.functional.rms_norm(x * 2 + 1, (8,)), rtol=1e-3)


def test_a_launch_that_reads_freed_memory_is_found(launcher: CapturingLauncher) -> None:
    kept = [torch.ones(2, 8)]
    out = torch.zeros(2, 8)
    graph = CudaLikeCapture()(lambda: None, lambda: CudaOps(launcher).rms_norm(kept[0], torch.ones(8), 1e-6, out))
    kept.clear()
    with pytest.raises(CaptureError, match=r"rms_norm.* reads memory that was given back"):
        graph.replay()
