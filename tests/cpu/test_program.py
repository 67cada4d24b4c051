"""Recorded programs of native calls: the CPU's graphs of decode steps. Replays must have the bits of eager steps."""

import gc
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tests.checkpoints import make_checkpoint
from tests.cpu.test_attention_reference import Batch
from tests.deadlines import scaled
from tests.driver import Driver, make_prompt, new_request
from tests.families.hybrid import VARIANTS as HYBRIDS
from tests.families.variant import Variant
from tests.plays import graphs_of, run_both
from vllm_lite.attention.backend import Heads
from vllm_lite.attention.cpu import CpuBackend
from vllm_lite.attention.reference import ReferenceBackend
from vllm_lite.attention.step_batch import StepBatch
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.quantization.on_load import Form
from vllm_lite.checkpoint.shard import Split
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.fused import CpuOps
from vllm_lite.kernels.cpu.library import int64, pointer
from vllm_lite.kernels.cpu.program import NotRecordable, Program
from vllm_lite.kernels.cpu.weights.linear import PackedWeight, linear, look_up
from vllm_lite.layers.weights.linear import Linear
from vllm_lite.layers.weights.matmul import DenseMatmul
from vllm_lite.models.llama import Llama
from vllm_lite.protocol.step import Continue, Draft, States
from vllm_lite.worker.graphs import CpuCapture, DecodeGraphs, Graph
from vllm_lite.worker.worker import Worker

pytestmark = pytest.mark.skipif(not cpu.available(), reason="needs the native library")


def recorded(run: Callable[[], Any]) -> Program:
    program = Program()
    program.record(lambda: run() and None)
    return program


# ---- decode steps of whole models

MIXED = {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama, untied": ("llama", {}, {}),
    "llama, tied, bfloat16": ("llama", {"tie_word_embeddings": True, "dtype": "bfloat16"}, {"dtype": "bfloat16"}),
    "llama, biases, float16": ("llama", {"attention_bias": True, "mlp_bias": True}, {"dtype": "float16"}),
    "mistral with a window": ("mistral", {"sliding_window": 9}, {}),
    "qwen3 with two KV groups": ("qwen3", MIXED, {"dtype": "bfloat16"}),
    "float8 cache": ("llama", {}, {"kv_cache_dtype": "fp8_e4m3", "dtype": "bfloat16"}),
    "int8 cache, two KV groups": ("qwen3", MIXED, {"kv_cache_dtype": "int8", "dtype": "bfloat16"}),
    "int8, tied": ("llama", {"tie_word_embeddings": True}, {"quantization": "int8", "dtype": "bfloat16"}),
    "int4_g32, exact rows": (
        "llama",
        {},
        {"quantization": "int4_g32", "dtype": "bfloat16", "exact_activations": True},
    ),
    "padded to sizes": ("llama", {}, {"cudagraph_capture_sizes": [3, 8]}),
}


@pytest.mark.parametrize("name", MODELS)
def test_replayed_steps_have_the_bits_of_eager_ones(name: str, tmp_path: Path) -> None:
    family, overrides, settings = MODELS[name]
    model = make_checkpoint(tmp_path / "model", family, **overrides)
    eager, graphed = run_both(model, seed=3, num_steps=120, on=None, **settings)
    graphs = graphs_of(graphed)
    assert graphs.num_replays > 30
    assert set(graphs.buckets) <= set(graphs.sizes)
    if "cudagraph_capture_sizes" not in settings:
        assert graphs.sizes == tuple(range(1, 9))
        assert len(graphs.buckets) >= 3
    assert eager.got == graphed.got


@pytest.mark.parametrize("variant", HYBRIDS, ids=lambda one: one.name)
def test_decode_steps_with_states_are_replayed(variant: Variant, tmp_path: Path) -> None:
    """Tokens and states have the bits of eager steps."""
    model, drivers = variant.make(tmp_path / "model"), []
    num_groups = len(load_spec(model).kv_groups)
    for enforce_eager in (True, False):
        driver = Driver(model, enforce_eager=enforce_eager)
        for handle in range(2):
            request = new_request(handle, make_prompt(6 + handle, seed=handle), None)
            blocks = [[2 + 8 * handle + group] for group in range(num_groups)]
            driver.run(replace(request, block_ids=blocks), States(handle, 0, 1 + handle, []))
        for _ in range(4):
            driver.run(Continue(0, 1, []), Continue(1, 1, []))
        driver.run(States(1, 2, 5, []), Continue(0, 1, []), Continue(1, 1, []))
        drivers.append(driver)
    eager, graphed = drivers
    assert graphs_of(graphed).num_replays == 5
    assert eager.got == graphed.got
    states = [driver.worker.runner.cache_engine.states for driver in drivers]
    assert torch.equal(*states)
    assert states[0][5].any()


def test_a_replay_runs_no_python(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(tiny_checkpoint)
    driver.run(new_request(0, make_prompt(9), [1, 2]))
    driver.decode(0, count=1)

    def forbidden(*_args: Any) -> None:
        raise AssertionError

    for owner, name in ((Llama, "forward"), (Llama, "logits"), (CpuBackend, "prepare"), (CpuBackend, "attend")):
        monkeypatch.setattr(owner, name, forbidden)
    driver.decode(0, count=5)
    assert len(driver.got[0]) == 7


def test_each_size_is_captured_once_and_when_it_is_needed(tiny_checkpoint: Path) -> None:
    driver = Driver(tiny_checkpoint)
    graphs = graphs_of(driver)
    for handle in range(3):
        driver.run(new_request(handle, make_prompt(5, seed=handle), [1 + handle]))
    assert not graphs.buckets, "prompts are not replayed"
    driver.decode(0, 1, count=3)
    assert list(graphs.buckets) == [2]
    bucket = graphs.buckets[2]
    driver.decode(0, 1, 2, count=1)
    driver.decode(0, 1, count=1)
    assert list(graphs.buckets) == [2, 3]
    assert graphs.buckets[2] is bucket
    assert graphs.num_replays == 5


def test_recording_is_no_part_of_a_steps_time(tiny_checkpoint: Path) -> None:
    driver = Driver(tiny_checkpoint)
    times_s = [driver.run(new_request(handle, make_prompt(5, seed=handle), [1 + handle])).other_s for handle in (0, 1)]
    for handles in ((0, 1), (0, 1), (0,), (0, 1), (0,)):
        began_s = time.perf_counter()
        times_s.append(driver.run(*(Continue(handle, 1, []) for handle in handles)).other_s)
        assert times_s[-1] < time.perf_counter() - began_s
    assert [took_s > 0 for took_s in times_s] == [False, False, True, False, True, False, False]


def test_steps_with_drafts_are_replayed(tiny_checkpoint: Path) -> None:
    driver = Driver(tiny_checkpoint, speculative_config={"method": "ngram", "num_speculative_tokens": 2})
    driver.run(new_request(0, [5, 6, 7, 5, 6, 7, 5, 6], [1]))
    driver.worker.runner.batch.tokens_of(0)[-1] = 7
    tried = graphs_of(driver).num_replays  # the timed steps at the start
    driver.run(Draft(0, 2, []))
    assert graphs_of(driver).num_replays == tried + 1
    driver.run(Continue(0, 1, []))
    assert graphs_of(driver).num_replays == tried + 2


def test_steps_with_more_rows_than_sequences_may_run_are_replayed(tiny_checkpoint: Path) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 4}
    driver = Driver(tiny_checkpoint, max_num_seqs=2, speculative_config=drafts)
    for handle in range(2):
        driver.run(new_request(handle, [5, 6, 7, 5, 6, 7, 5, 6], [1 + handle]))
        driver.worker.runner.batch.tokens_of(handle)[-1] = 7
    tried = graphs_of(driver).num_replays
    driver.run(*(Draft(handle, 4, []) for handle in range(2)))
    assert graphs_of(driver).num_replays == tried + 1
    assert 10 in graphs_of(driver).buckets


def test_models_that_cannot_be_recorded_run_eagerly(
    tiny_checkpoint: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference backend computes with torch. It says itself that it is not to be recorded; here it does not."""
    monkeypatch.setattr(ReferenceBackend, "graph_safe", True)
    with caplog.at_level(logging.DEBUG, "vllm_lite"):
        _, graphed = run_both(tiny_checkpoint, seed=4, num_steps=40, on=None, attention_backend="reference")
    graphs = graphs_of(graphed)
    assert graphs.num_replays == 0
    told = [record for record in caplog.records if "not recorded" in record.message]
    assert [record.levelno for record in told] == [logging.INFO] + [logging.DEBUG] * (len(told) - 1)
    assert len(told) == len(graphs._failed) > 1, "each size is tried once"
    assert all("aten" in record.message for record in told)


def test_a_size_that_cannot_be_recorded_leaves_the_others(
    tiny_checkpoint: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = list[int]()

    def only_more_than_two(graphs: DecodeGraphs, size: int) -> Any:
        tried.append(size)
        if size > 2:
            return inner(graphs, size)
        with monkeypatch.context() as patch:
            patch.setattr(Linear, "forward", lambda _self, x, out: out.copy_(x[..., :1]))
            return inner(graphs, size)

    eager, driver, inner = Driver(tiny_checkpoint, enforce_eager=True), Driver(tiny_checkpoint), DecodeGraphs._capture
    monkeypatch.setattr(DecodeGraphs, "_capture", only_more_than_two)
    with caplog.at_level(logging.INFO, "vllm_lite"):
        for each in (eager, driver):
            for handle in range(3):
                each.run(new_request(handle, make_prompt(5, seed=handle), [1 + handle]))
            for handles in ((0, 1), (0, 1, 2), (0, 1), (2,), (0, 1, 2)):
                each.decode(*handles, count=2)
    assert driver.got == eager.got
    assert tried == [2, 3, 1]
    assert graphs_of(driver).num_replays == 4
    (line,) = [line for line in caplog.messages if "not recorded" in line]
    assert line.startswith("steps of 2 rows are not recorded and run eagerly: aten")


@pytest.mark.parametrize("what", ["linear", "norm", "embedding"])
def test_an_operation_that_falls_back_to_torch_is_noticed(
    tiny_checkpoint: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "linear":
        monkeypatch.setattr(
            "vllm_lite.layers.weights.weight_form.make_matmul", lambda weight, bias, _: DenseMatmul(weight, bias)
        )
    elif what == "norm":
        monkeypatch.setattr(CpuOps, "add_rms_norm", CpuOps.__mro__[1].add_rms_norm)  # type: ignore[attr-defined]
    else:
        monkeypatch.setattr("vllm_lite.layers.weights.embedding.look_up", lambda *_: False)
    driver = Driver(tiny_checkpoint)
    driver.run(new_request(0, make_prompt(9), [1]))
    driver.decode(0, count=3)
    assert graphs_of(driver).num_replays == 0
    assert len(driver.got[0]) == 4


def test_a_plan_that_is_not_made_again_shows(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the random steps: what is prepared once, for the lengths of the first step, does not do."""
    capture = CpuCapture.__call__

    def prepared_once(self: CpuCapture, prepare: Callable[[], None], run: Callable[[], None]) -> Graph:
        prepare()
        return capture(self, lambda: None, run)

    monkeypatch.setattr(CpuCapture, "__call__", prepared_once)
    with pytest.raises(AssertionError):
        run_both(tiny_checkpoint, seed=3, num_steps=120, on=None)


def test_enforce_eager_records_nothing(tiny_checkpoint: Path) -> None:
    worker: Worker = Driver(tiny_checkpoint, enforce_eager=True).worker
    assert worker.device.capture is None
    assert worker.graph_sizes == ()


# ---- attention with splits, whose memory grows


def attention(batch: Batch, max_seq_len: int) -> tuple[Program, StepBatch, torch.Tensor]:
    """A program of one layer's attention on the batch's own memory."""
    step = batch.step()
    step.max_seq_len = max_seq_len
    out = torch.full(batch.query.shape, 7.0, dtype=batch.query.dtype)

    def run() -> None:
        batch.backend.prepare(step)
        batch.backend.write_kv(Heads(batch.query, batch.key, batch.value), batch.kv, step, 0)
        batch.backend.attend(batch.query, batch.kv, step, 0, out, batch.sinks)

    return recorded(run), step, out


def test_lengths_may_grow_to_the_longest_after_recording() -> None:
    long = Batch([(1, 5000), (1, 3), (1, 9000)], backend=CpuBackend, filler=0.0, sinks=True)
    expected = long.run()
    program, step, out = attention(long, max_seq_len=9000)
    lengths = step.seq_lens.clone()
    for lens in ([1, 3, 0], [600, 1, 1030], lengths.tolist()):
        step.seq_lens.copy_(torch.tensor(lens))
        program.replay()
        assert out.isfinite().all()
    assert torch.equal(out, expected)


def test_memory_of_a_program_outlives_its_replacement() -> None:
    """For a larger step the backend allocates new scratch memory; a program keeps its old one."""
    batch = Batch([(1, 2000), (1, 1500)], backend=CpuBackend)
    expected = batch.run()
    program, step, out = attention(batch, max_seq_len=2048)
    before = batch.backend.kernels[0].scratch
    batch.backend.kernels[0].reserve(*(2 * len(part) + 1 for part in before))
    assert batch.backend.kernels[0].scratch[0] is not before[0]
    assert all(any(kept is part for kept in step.plan.scratch) for part in before)
    del before
    gc.collect()
    program.replay()
    assert torch.equal(out, expected)


def test_a_longer_sequence_than_was_prepared_for_is_an_error() -> None:
    batch = Batch([(1, 400), (1, 400)], backend=CpuBackend)
    program, step, _ = attention(batch, max_seq_len=400)
    program.replay()
    step.seq_lens.fill_(5000)
    with pytest.raises(RuntimeError, match=r"call 0 of 3 .*vllm_lite_attention_plan"):
        program.replay()
    step.max_seq_len = 400
    with pytest.raises(RuntimeError, match="longer than 400"):
        batch.backend.prepare(step)


# ---- programs


def test_a_call_is_kept_and_not_made() -> None:
    table, ids, out = torch.randn(5, 8), torch.tensor([4, 0]), torch.zeros(2, 8)
    program = recorded(lambda: look_up(table, ids, out))
    assert not out.any()
    program.replay()
    assert torch.equal(out, table[[4, 0]])
    ids.copy_(torch.tensor([1, 1]))
    program.replay()
    assert torch.equal(out, table[[1, 1]])
    look_up(table, torch.tensor([2, 3]), out)
    assert torch.equal(out, table[[2, 3]]), "recording is over"


def test_a_look_up_of_a_part_of_the_ids_can_be_recorded() -> None:
    table, ids, out = torch.randn(5, 8), torch.tensor([4, 6]), torch.ones(2, 8)
    program = recorded(lambda: look_up(table, ids, out, Split(15, 5, 5)))
    program.replay()
    assert torch.equal(out, torch.stack((torch.zeros(8), table[1])))
    ids.copy_(torch.tensor([9, 10]))
    program.replay()
    assert torch.equal(out, torch.stack((table[4], torch.zeros(8))))


def test_a_profile_is_a_replay_that_tells_times() -> None:
    table, ids, out = torch.randn(5, 8), torch.tensor([4, 0]), torch.zeros(2, 8)
    program = recorded(lambda: look_up(table, ids, out))
    before = time.perf_counter_ns()
    times = program.profile()
    assert torch.equal(out, table[[4, 0]])
    assert program.names == ["vllm_lite_look_up"]
    assert times.shape == (1,)
    assert 0 < times.sum() <= time.perf_counter_ns() - before
    ids[1] = 5
    with pytest.raises(RuntimeError, match="call 0 of 1"):
        program.profile()


@pytest.mark.parametrize("forms", [(None, None), ("int5_g32", "int8"), ("int4_g32", "int8")])
@pytest.mark.usefixtures("two_threads")
def test_two_products_of_few_rows_are_one_job(forms: tuple[Form | None, Form | None]) -> None:
    first, second = (PackedWeight(torch.randn(576, 576).bfloat16(), form=form) for form in forms)
    x, out, together = (torch.randn(5, columns).bfloat16() for columns in (576, 1152, 1152))
    for num_rows, threads in product((1, 4, 5), (1, 2, 3, 4)):
        cpu.set_num_threads(threads)
        run = partial(run_both_products, x[:num_rows], first, second)
        run(out[:num_rows])
        together.zero_()
        program = recorded(partial(run, together[:num_rows]))
        program.replay()
        assert torch.equal(together[:num_rows], out[:num_rows]), (num_rows, threads)
        both, none = np.min([program.profile() for _ in range(20)], axis=0)
        is_one_job = num_rows <= 4 and threads in (2, 3)  # 4 threads have unequal parts of 18 blocks
        assert (none < both / 10) == is_one_job, (num_rows, threads)


def run_both_products(x: torch.Tensor, first: PackedWeight, second: PackedWeight, out: torch.Tensor) -> None:
    linear(x, first, out[:, : first.num_outputs])
    linear(x, second, out[:, first.num_outputs :])


def test_a_call_that_fails_ends_the_program() -> None:
    table, ids, out, behind = torch.randn(5, 8), torch.tensor([4, 0]), torch.zeros(2, 8), torch.zeros(2, 8)

    def run() -> None:
        look_up(table, ids, out)
        look_up(table, ids, behind)

    program = recorded(run)
    assert len(program) == 2
    ids[1] = 5
    with pytest.raises(RuntimeError, match=r"call 0 of 2 .* vllm_lite_look_up"):
        program.replay()
    assert not behind.any()


def test_numbers_of_every_type_survive() -> None:
    """A float (eps), sizes, strides and a null pointer (no bias)."""
    x, weight, out = torch.randn(3, 40), torch.randn(40), torch.zeros(3, 40)
    packed, product = PackedWeight(torch.randn(50, 40)), torch.zeros(3, 50)

    def run() -> None:
        CpuOps().rms_norm(x, weight, 0.0625, out)
        linear(out, packed, product)

    program = recorded(run)
    program.replay()
    got = out.clone(), product.clone()
    out.zero_()
    product.zero_()
    run()
    assert torch.equal(got[0], out)
    assert torch.equal(got[1], product)


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x.add_(1),
        lambda x: x + 1,
        lambda x: torch.empty(len(x)),
        lambda x: x.new_empty(0),
        lambda x: x.t().contiguous(),
        lambda x: x.t().reshape(6),
        lambda x: x.to(torch.float64),
        lambda x: torch.zeros(2, 3).copy_(x),
        lambda x: torch.mm(x, x.t()),
        lambda x: x[torch.tensor([0])],
        lambda x: x.sum().item(),
    ],
)
@pytest.mark.parametrize("inference", [True, False])
def test_operations_of_torch_are_refused(operation: Callable[[torch.Tensor], Any], inference: bool) -> None:
    x = torch.ones(2, 3)
    with torch.inference_mode(inference), pytest.raises(NotRecordable, match="operation of torch"):
        recorded(lambda: operation(x))
    assert x.eq(1).all(), "refused before it is carried out"
    assert torch.equal(x + 1, torch.full((2, 3), 2.0)), "and allowed again"


def test_views_are_not_refused() -> None:
    x = torch.ones(2, 6)

    def parts() -> None:
        x.unflatten(1, (2, 3)).chunk(2)[0].split((1, 1), dim=1)

    with torch.inference_mode():
        assert len(recorded(parts)) == 0
        assert len(recorded(lambda: x[:, 1:].view(2, 5, 1).transpose(0, 1)[0].t().unsqueeze(0).data_ptr())) == 0


def test_other_threads_are_not_recorded() -> None:
    """They may be other ranks of the model, which run steps and record programs at the same time."""
    table, ids, out, others = torch.randn(5, 8), torch.tensor([4, 0]), torch.zeros(2, 8), torch.zeros(2, 8)
    programs: list[Program] = []

    def other() -> None:
        look_up(table, ids, others)
        programs.append(recorded(lambda: look_up(table, ids, others)))

    def run() -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(scaled(20))
        look_up(table, ids, out)

    program = recorded(run)
    assert program.names == programs[0].names == ["vllm_lite_look_up"]
    assert torch.equal(others, table[[4, 0]])
    assert not out.any()
    with pytest.raises(RuntimeError, match="being recorded already"):
        recorded(lambda: recorded(run))
    look_up(table, ids, out)
    assert torch.equal(out, others), "recording is over"


def test_what_is_no_part_of_a_program() -> None:
    def copy_blocks() -> None:
        cpu.library.function("vllm_lite_copy_blocks", (pointer, pointer, int64, pointer, int64))(0, 0, 0, 0, 0)

    with pytest.raises(NotRecordable, match="vllm_lite_copy_blocks cannot be recorded"):
        recorded(copy_blocks)
    with pytest.raises(NotRecordable, match="vllm_lite_num_threads cannot be recorded"):
        recorded(cpu.num_threads)
    assert cpu.num_threads() >= 1


def test_recording_loads_nothing_of_torch() -> None:
    """Loading torch's compiler, for instance, would delay the first request by a second."""
    script = (
        "import sys, torch\n"
        "from vllm_lite.kernels.cpu.program import Program\n"
        "x, loaded = torch.zeros(4, 4), set(sys.modules)\n"
        "Program().record(lambda: x[:2].view(-1) is None)\n"
        "print(sorted(set(sys.modules) - loaded))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=scaled(60))
    assert (done.stdout, done.stderr) == ("[]\n", "")
