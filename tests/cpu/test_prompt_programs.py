"""Programs of steps with prompts: replays have the bits of eager steps, in any mix of prompts, chunks and decodes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.cpu.test_model_runner_drafts import Parrot
from tests.driver import Driver, make_prompt, new_request
from tests.families import all as families
from tests.families import hybrid
from tests.families.variant import Variant
from tests.gguf_files import write_gguf
from tests.plays import Recorder, graphs_of, run_both
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu import library as native
from vllm_lite.kernels.cpu.fused import CpuOps
from vllm_lite.kernels.cpu.program import NotRecordable, Program, SizedProgram
from vllm_lite.kernels.ops import TorchOps
from vllm_lite.protocol.codec import engine_to_worker
from vllm_lite.protocol.control import Shutdown
from vllm_lite.protocol.step import Continue, Draft, Finish
from vllm_lite.runtime.wakeup import Wakeup
from vllm_lite.worker import forward, prompt_programs
from vllm_lite.worker.batch.step_inputs import StepInputs
from vllm_lite.worker.process import WorkerLoop
from vllm_lite.worker.progress import Progress
from vllm_lite.worker.prompt_programs import PromptPrograms

pytestmark = pytest.mark.skipif(not cpu.available(), reason="needs the native library")

MIXED = {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "bfloat16": ("llama", {"tie_word_embeddings": True, "dtype": "bfloat16"}, {"dtype": "bfloat16"}),
    "float16, biases": ("llama", {"attention_bias": True, "mlp_bias": True}, {"dtype": "float16"}),
    "two KV groups": ("qwen3", MIXED, {"dtype": "bfloat16"}),
    "float8 cache": ("llama", {}, {"kv_cache_dtype": "fp8_e4m3", "dtype": "bfloat16"}),
    "int8 cache": ("qwen3", MIXED, {"kv_cache_dtype": "int8", "dtype": "bfloat16"}),
    "int8": ("llama", {"tie_word_embeddings": True}, {"quantization": "int8", "dtype": "bfloat16"}),
    "int4_g32": ("llama", {}, {"quantization": "int4_g32", "dtype": "bfloat16"}),
}

ATTENDING = [variant for variant in families.VARIANTS if variant not in hybrid.VARIANTS]
SPARSE = {"deepseek-v32", "glm-moe-dsa", "glm-moe-dsa-each"}
"""Families that choose the tokens to attend to by torch."""


def prompts_of(driver: Driver) -> PromptPrograms:
    other = graphs_of(driver).other
    assert isinstance(other, PromptPrograms)
    return other


@pytest.fixture(params=["with a tail", "without"])
def tail(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the last layer attends for the sampled tokens alone, which pays in larger steps only."""
    monkeypatch.setattr(forward, "LEAST_PAIRS", 1 if request.param == "with a tail" else 1 << 62)


@pytest.mark.usefixtures("tail")
@pytest.mark.parametrize("name", MODELS)
def test_replayed_steps_have_the_bits_of_eager_ones(name: str, tmp_path: Path) -> None:
    family, overrides, settings = MODELS[name]
    _, graphed = run_both(make_checkpoint(tmp_path, family, **overrides), 5, 60, None, **settings)
    assert prompts_of(graphed).num_replays > 5


@pytest.mark.usefixtures("tail")
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q5_1"])
def test_steps_of_gguf_files_have_the_bits_of_eager_ones(kind: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", hidden_size=256, intermediate_size=256)
    file = write_gguf(tmp_path / "model.gguf", checkpoint, lambda _: kind)
    _, graphed = run_both(file, 6, 40, None, dtype="bfloat16")
    assert prompts_of(graphed).num_replays > 5


@pytest.mark.parametrize("variant", ATTENDING, ids=lambda one: one.name)
def test_steps_of_all_families_have_the_bits_of_eager_ones(
    variant: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "LEAST_PAIRS", 100)
    _, graphed = run_both(variant.make(tmp_path), 7, 25, None)
    assert (prompts_of(graphed).num_replays > 3) == (variant.name not in SPARSE)


# ---- what a step reads


@pytest.mark.parametrize("max_num_batched_tokens", [1, 2, 3, 64])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 4])
@pytest.mark.usefixtures("tail")
def test_few_sequences_and_few_tokens(max_num_seqs: int, max_num_batched_tokens: int, tiny_checkpoint: Path) -> None:
    """The smallest and the largest step of an engine may be nearly equal."""
    max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
    limits: dict[str, Any] = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    results, replays = [], []
    for eager in (False, True):
        driver = Driver(tiny_checkpoint, enforce_eager=eager, **limits)
        for count in range(max_num_seqs, 0, -1):  # smaller steps find the numbers of larger ones in memory
            handles = [10 * count + index for index in range(count)]
            length = max(1, max_num_batched_tokens // count)
            requests = [
                new_request(handle, make_prompt(min(length, 3 * count), seed=handle), [1 + index])
                for index, handle in enumerate(handles)
            ]
            driver.run(*requests)
            driver.run(*(Finish(handle) for handle in handles))
        results.append(driver.got)
        replays.append(0 if eager else prompts_of(driver).num_replays)
    assert results[0] == results[1]
    if max_num_batched_tokens == 64:
        assert replays[0] == max_num_seqs, "every step with prompts"


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_prompt_behind_a_cached_prefix(tiny_checkpoint: Path, enforce_eager: bool) -> None:
    """Its tokens are those of the prompt computed as a whole, beside decodes and another prompt."""
    driver, prompt = Driver(tiny_checkpoint, enforce_eager=enforce_eager), make_prompt(40)
    driver.run(new_request(0, prompt, [1, 2, 3, 4]))
    later = new_request(1, prompt, [1, 2, 5, 6], num_computed=32, num_cached=32, num_tokens=8)
    driver.run(Continue(0, 1, []), later, new_request(2, make_prompt(7), [7]))
    driver.decode(0, 1, 2, count=5)
    assert driver.got[1] == driver.got[0][:-1]
    if not enforce_eager:
        assert prompts_of(driver).num_replays == 2


def test_drafts_beside_a_prompt(tiny_checkpoint: Path, tail: None) -> None:
    """Several tokens of a sequence are sampled from; they come first."""
    drivers = [Driver(tiny_checkpoint, enforce_eager=enforce_eager) for enforce_eager in (True, False)]
    logits = [Recorder(driver).logits for driver in drivers]
    for driver in drivers:
        prompt = make_prompt(30, seed=11)
        driver.drafts.drafter = Parrot([*prompt, *[7] * 20])
        driver.run(new_request(0, prompt, [1, 2, 3, 4]))
        driver.run(new_request(1, make_prompt(40, seed=2), [5, 6, 7, 8], num_tokens=20), Draft(0, 3, []))
        driver.run(Draft(0, 3, []), Continue(1, 20, []))
    assert all(map(torch.equal, *logits))
    assert [len(step) for step in logits[0]] == [1, 4, 5]
    assert prompts_of(drivers[1]).num_replays == 3


@pytest.mark.parametrize("what", ["_numbers", "_starts", "_seq_lens", "_tables", "_wanted"])
def test_memory_that_is_not_brought_up_to_date_shows(
    tiny_checkpoint: Path, what: str, monkeypatch: pytest.MonkeyPatch, tail: None
) -> None:
    """A control: the comparison with eager steps fails for each part of the memory that is not written."""
    logits = PromptPrograms.logits

    def forgetful(self: PromptPrograms, inputs: StepInputs) -> torch.Tensor:
        owners = [self] if what == "_wanted" else [self._rows, self._tail_rows]
        parts = [getattr(owner, what) for owner in owners]
        tensors = [tensor for part in parts for tensor in (part if isinstance(part, list) else [part])]
        kept = [tensor.clone() for tensor in tensors]
        replay = SizedProgram.replay

        def stale(program: SizedProgram, sizes: Any) -> None:
            for tensor, before in zip(tensors, kept, strict=True):
                tensor.copy_(before)
            replay(program, sizes)

        with monkeypatch.context() as patch:
            patch.setattr(SizedProgram, "replay", stale)
            return logits(self, inputs)

    monkeypatch.setattr(PromptPrograms, "logits", forgetful)
    with pytest.raises((AssertionError, RuntimeError)):
        run_both(tiny_checkpoint, 1, 60, None)


# ---- when programs are recorded, and for whom


def test_a_replay_runs_no_python(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(tiny_checkpoint)
    driver.run(new_request(9, make_prompt(1), [33]))
    eager = driver.worker.runner.eager

    def forbidden(*_args: Any) -> None:
        raise AssertionError

    for owner, name in (
        (eager, "hidden"),
        (eager.model, "forward"),
        (eager.model, "logits"),
        (eager.backend, "prepare"),
    ):
        monkeypatch.setattr(owner, name, forbidden)
    for handle, length in enumerate((9, 30, 1, 64)):
        driver.run(new_request(handle, make_prompt(length), list(range(1 + 4 * handle, 5 + 4 * handle))))
    assert len(driver.got) == 5


def test_before_they_are_recorded_steps_run_eagerly(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(PromptPrograms, "record_ahead", lambda _: False)
        driver = Driver(tiny_checkpoint)
    driver.run(new_request(0, make_prompt(9), [1]))
    assert prompts_of(driver).num_replays == 0
    count = 0
    while driver.worker.record_ahead():
        count += 1
    assert count == 15, "three programs of five steps"
    driver.run(new_request(1, make_prompt(9), [2]))
    assert prompts_of(driver).num_replays == 1
    assert driver.got[0] == driver.got[1]


@pytest.mark.parametrize("what", ["adapters", "states", "hidden states", "large"])
def test_other_steps_run_eagerly(
    what: str, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"enable_lora": True} if what == "adapters" else {}
    if what == "large":
        monkeypatch.setattr(prompt_programs, "MOST_WORK", 1_000_000)  # of a model with 100,000 parameters
    model = hybrid.VARIANTS[0].make(tmp_path / "model") if what == "states" else tiny_checkpoint
    driver = Driver(model, **settings)
    if what == "states":
        assert not driver.worker.record_ahead()
        assert not prompts_of(driver)._programs
        return
    if what == "hidden states":
        monkeypatch.setattr(StepInputs, "is_eager", True)
    driver.run(new_request(0, make_prompt(24), [1, 2]))
    assert prompts_of(driver).num_replays == 0
    if what == "large":
        driver.run(new_request(1, make_prompt(5), [3]))
        assert prompts_of(driver).num_replays == 1


class Waiting:
    """A connection without a message until it was asked `count` times."""

    def __init__(self, count: int) -> None:
        self.left = count

    def recv(self) -> bytes | None:
        self.left -= 1
        return engine_to_worker.encode(Shutdown()) if self.left < 0 else None

    def lost(self) -> bool:
        return False


def test_a_worker_records_while_it_has_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """One part at a time, and looks for a message after each."""
    loop: Any = WorkerLoop.__new__(WorkerLoop)
    loop.connection, loop.stop, loop.disk, loop.progress = Waiting(3), Wakeup(), None, Progress()
    done: list[int] = []

    def record_ahead() -> bool:
        done.append(loop.connection.left)
        return True

    loop.record_ahead = record_ahead
    assert loop.receive() is None
    assert done == [2, 1, 0]


# ---- programs of any size


def program_of(*calls: tuple[int, int, int]) -> Program:
    """A program that copies rows: (row of the source, number of rows, row of the target) of a shared memory."""
    program = Program()
    size, address = native.int64, native.pointer
    types = address, size, size, size, address, size, address, size
    copy = native.function("vllm_lite_take_rows", types, size)
    start = MEMORY.data_ptr()

    def run() -> None:
        for source, count, target in calls:
            copy(start + 8 * source, 8, 64, 8, IDS.data_ptr(), count, start + 8 * target, 8)

    program.record(run)
    return program


MEMORY, IDS = torch.arange(128), torch.arange(64)


def test_words_grow_with_one_size_each() -> None:
    """Numbers and addresses."""
    sizes = SizedProgram.sizes_to_record((1, 1, 0), (9, 6, 0))
    assert sizes[:2] == [(9, 6, 0), (1, 1, 0)]
    sized = SizedProgram([((n, s, t), program_of((0, n, 64), (2 * s, 3, 100 - n))) for n, s, t in sizes])
    for n, s in ((4, 3), (9, 1), (2, 6)):
        MEMORY.copy_(torch.arange(128))
        sized.replay((n, s, 0))
        expected = torch.arange(128)
        expected[64 : 64 + n] = torch.arange(n)
        expected[100 - n : 103 - n] = torch.arange(2 * s, 2 * s + 3)
        assert torch.equal(MEMORY, expected)


@pytest.mark.parametrize(
    ("calls", "says"),
    [
        (lambda n, s: [(0, n + s, 64)], "does not grow evenly"),
        (lambda n, _: [(0, 3, 64), (0, min(n, 5), 64)], "does not grow evenly"),
        (lambda n, _: [(0, n // 2, 64)], "does not grow evenly"),
        (lambda n, _: [(0, n, 64)] * (1 + (n > 7)), "other calls"),
        (lambda n, _: [(0, n, 64)] * (1 + (4 <= n <= 12)), "other calls"),
        (lambda n, _: [(0, n, 64 + (4 <= n <= 12))], "does not grow evenly"),
    ],
    ids=["two sizes", "bounded", "rounded", "another way", "another way in the middle", "another word in the middle"],
)
def test_other_words_are_refused(calls: Any, says: str) -> None:
    with pytest.raises(NotRecordable, match=says):
        SizedProgram([(sizes, program_of(*calls(*sizes))) for sizes in SizedProgram.sizes_to_record((1, 1), (17, 6))])


def test_a_size_that_never_varied_fits_with_its_value_alone() -> None:
    """The growth of words with it is not known."""
    sizes = SizedProgram.sizes_to_record((1, 2, 1), (9, 2, 6))
    sized = SizedProgram([((n, s, t), program_of((0, n, 64))) for n, s, t in sizes])
    assert sized.fits((3, 2, 4))
    assert not sized.fits((3, 1, 4))
    assert not sized.fits((3, 3, 4))


def test_sizes_with_too_few_values_are_refused() -> None:
    SizedProgram.sizes_to_record((1, 1), (2, 2))
    with pytest.raises(NotRecordable, match="too small"):
        SizedProgram.sizes_to_record((1, 1, 1), (2, 2, 2))


@pytest.mark.parametrize("offset", [0, 2, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_taken_rows_may_overlap_their_source(offset: int, dtype: torch.dtype) -> None:
    memory = torch.randn(40, 3, 16).to(dtype)
    ids = torch.tensor([3, 9, 1, 1, 5, 0])
    results = []
    for ops in (TorchOps(), CpuOps()):
        own = memory.clone()
        ops.take_rows(own[4:20, 1:], ids, own[4 + offset : 10 + offset, 1:])
        results.append(own)
    assert torch.equal(*results)
    assert torch.equal(results[0][4 + offset : 10 + offset, 1:], memory[4:20, 1:][ids])
    with pytest.raises(IndexError, match="16 rows, and row 16"):
        CpuOps().take_rows(memory[4:20], torch.tensor([3, 16]), memory[:2])
