"""The model drafts for itself in 4 bits: the same tokens and KV, and drafts that are drawn as the tokens are."""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.chain_mask import ChainMask
from tests.checkpoints import make_checkpoint
from tests.driver import GREEDY, WARM, Driver, make_prompt, new_request
from tests.families.hybrid import VARIANTS as HYBRIDS
from tests.gguf_files import write_gguf
from tests.parity_mask import ParityMask
from vllm_lite.checkpoint import sizing
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.tensors.headers import read_headers
from vllm_lite.checkpoint.tensors.weight_bytes import Checkpoint, copy_bytes
from vllm_lite.errors import ConfigError
from vllm_lite.kernels.cpu.weights.linear import PackedWeight
from vllm_lite.models.llama import Llama
from vllm_lite.protocol.params import LogitRules, Sampling
from vllm_lite.protocol.step import BlockOp, Continue, Draft, Finish, Fork, ReplaceBlock, States
from vllm_lite.tools.plan import PlanConfig, make_plan
from vllm_lite.tools.plan_checkpoint import load
from vllm_lite.worker.drafting.chain import Chain
from vllm_lite.worker.drafting.recorded_chain import RecordedChain
from vllm_lite.worker.drafting.self_drafter import SelfDrafter
from vllm_lite.worker.sampling.drafter import DraftBatch

PROMPT = make_prompt(30, seed=11)
NARROW = msgspec.structs.replace(WARM, top_k=20, top_p=0.9)
RULED = msgspec.structs.replace(WARM, rules=LogitRules(bad_words=((7, 9), (11,)), bias=((5, 3.0),)))
MASKED = msgspec.structs.replace(WARM, rules=LogitRules())
SAMPLINGS = {"greedy": GREEDY, "seeded": WARM, "narrow": NARROW, "ruled": RULED, "masked": MASKED}
KINDS = {
    each.name: each
    for each in HYBRIDS
    if each.name in ("qwen3.5", "granite-hybrid-moe", "nemotron-h", "lfm2", "falcon-h1", "mamba2", "qwen3-next")
}
PLACES = States(1, 0, 1, []), States(0, 0, 2, [])
"""Slots of the states of the sequences of `generate`."""
SELF: dict[str, Any] = {"speculative_config": {"method": "self", "num_speculative_tokens": 3}}


def drafter_of(driver: Driver) -> SelfDrafter:
    drafter: Any = driver.worker.drafter
    return drafter.with_model  # type: ignore[no-any-return]


def draft_by(driver: Driver, forward: Any) -> None:
    """Replace the drafting model by another one, whose passes are not recorded."""
    chain: Any = drafter_of(driver).chain
    chain.forward, chain._recorded = forward, None


def generate(
    driver: Driver,
    sampling: Sampling,
    count: int = 20,
    num_drafts: int = 3,
    states: tuple[States, ...] = (),
) -> list[int]:
    """Number of tokens that each step gave a sequence, beside another one that drafts less."""
    driver.got, given = {}, list[int]()
    if sampling is MASKED:
        driver.rules.mask_source_of = lambda _: ParityMask(384)
    requests = [
        new_request(1, PROMPT[:5], [20, 21, 22, 23, 24]),
        new_request(0, PROMPT, [1, 2, 3, 4], sampling=sampling),
    ]
    if not driver.ready.groups:  # a model without attention
        requests = [msgspec.structs.replace(each, block_ids=[]) for each in requests]
    driver.run(*requests, *states)
    while len(driver.got[0]) < count:
        before = len(driver.got[0])
        if num_drafts:
            driver.run(Draft(1, 1, []), Draft(0, num_drafts, []))
        else:
            driver.run(Continue(1, 1, []), Continue(0, 1, []))
        given.append(len(driver.got[0]) - before)
    return given


@pytest.mark.parametrize("eager", [False, True], ids=["programs", "eager"])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_tokens_and_kv_are_those_without_drafts(tiny_checkpoint: Path, sampling: Sampling, eager: bool) -> None:
    plain = Driver(tiny_checkpoint, enforce_eager=eager)
    generate(plain, sampling, num_drafts=0)
    driver = Driver(tiny_checkpoint, enforce_eager=eager, **SELF)
    given = generate(driver, sampling)
    assert driver.got[0][:20] == plain.got[0][:20]
    beside = driver.got[1][:10]  # fewer where the first has more right drafts
    assert beside == plain.got[1][: len(beside)]
    assert len(beside) > 5
    assert max(given) > 1, "drafts of a copy in 4 bits are right at times"
    num_computed = len(PROMPT) + 19
    for block in range(1, 4):
        rows = min(16, num_computed - 16 * (block - 1))
        for got, want in zip(driver.worker.runner.eager.kv_caches, plain.worker.runner.eager.kv_caches, strict=True):
            torch.testing.assert_close(got[block, :, :, :rows], want[block, :, :, :rows], atol=1e-5, rtol=1e-4)


Drafts = list[list[list[int]]]


def watch_drafts(driver: Driver) -> Drafts:
    """The drafts of all steps to come."""
    drafter, seen = drafter_of(driver), Drafts()
    before = drafter.before

    def watched(batch: DraftBatch) -> Sequence[Any]:
        seen.append([drafts.tolist() for drafts in before(batch)])
        return [np.array(drafts, np.int32) for drafts in seen[-1]]

    drafter.before = watched  # type: ignore[method-assign]
    return seen


def of_four(driver: Driver, sampling: Sampling, states: tuple[States, ...] = ()) -> None:
    """Four sequences: not all of them draft, or they draft different numbers of tokens, and in another order."""
    for handle in range(4):
        blocks = [1 + 4 * handle + each for each in range(4)]
        driver.run(
            new_request(handle, make_prompt(9 + 3 * handle, seed=handle), blocks, sampling=sampling),
            *states[handle : handle + 1],
        )
    for counts in ((1, 3, 2, 3), (3, 3, 1, 1), (0, 2, 0, 1), (3, 3, 3, 3)):
        driver.run(*(Draft(n, count, []) if count else Continue(n, 1, []) for n, count in enumerate(counts)))


@pytest.mark.parametrize("sampling", [GREEDY, WARM, NARROW], ids=["greedy", "seeded", "narrow"])
@pytest.mark.parametrize("name", ["attention", "qwen3.5", "lfm2"])
def test_recorded_passes_have_the_same_drafts_as_others(name: str, sampling: Sampling, tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path / "model") if name == "attention" else KINDS[name].make(tmp_path / "model")
    states = tuple(States(handle, 0, 1 + handle, []) for handle in range(4)) if name != "attention" else ()
    found = []
    for is_recorded in (True, False):
        driver = Driver(made, **SELF)
        chain: Any = drafter_of(driver).chain
        assert chain._recorded is not None
        if not is_recorded:
            chain._recorded = None
        drafts, replays = watch_drafts(driver), chain.forward.num_replays
        of_four(driver, sampling, states)
        assert (chain.forward.num_replays > replays) is True
        found.append((drafts, driver.got))
    assert found[0] == found[1]
    assert [len(each) for each in found[0][0]] == [4, 4, 2, 4]


def test_recorded_passes_run_no_model_of_python(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(tiny_checkpoint, **SELF)
    driver.run(new_request(0, PROMPT, [1, 2, 3, 4]))
    driver.run(Draft(0, 3, []))

    def forbidden(*_args: Any) -> None:
        raise AssertionError

    for owner, name in ((Llama, "forward"), (Llama, "logits"), (Chain, "inputs")):
        monkeypatch.setattr(owner, name, forbidden)
    for _ in range(3):
        driver.run(Draft(0, 3, []))


def test_a_recorded_draft_that_cannot_be_drawn_ends_the_drafts(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, calls = Driver(tiny_checkpoint, **SELF), list[int]()
    picks = RecordedChain._pick

    def poisoned(self: RecordedChain, step: Any, draws: Any) -> Any:
        calls.append(len(step.logits))
        if len(calls) == 2:
            step.logits[0] = float("nan")
        return picks(self, step, draws)

    monkeypatch.setattr(RecordedChain, "_pick", poisoned)
    driver.run(new_request(1, PROMPT[:5], [20, 21, 22]), new_request(0, PROMPT, [1, 2, 3, 4]))
    assert driver.run(Draft(0, 3, []), Draft(1, 2, [])).drafted == [1, 2]
    assert calls == [2, 2, 1]


@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}], ids=["floats", "int8"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "own head"])
def test_a_plan_counts_the_weights_of_the_copy(
    tmp_path: Path, settings: dict[str, Any], tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(tmp_path, hidden_size=128, tie_word_embeddings=tied)
    kept: list[int] = []
    made, load = PackedWeight.__init__, SelfDrafter.load

    def count(self: PackedWeight, *args: Any, **named: Any) -> None:
        made(self, *args, **named)
        kept.append(self.num_bytes)

    def of_copy(self: SelfDrafter, place: Any) -> None:
        kept.clear()
        load(self, place)
        found.append(sum(kept))

    found: list[int] = []
    monkeypatch.setattr(PackedWeight, "__init__", count)
    monkeypatch.setattr(SelfDrafter, "load", of_copy)
    Driver(path, **SELF, **settings)
    checkpoint = Checkpoint(load_spec(path), read_headers(path))
    norms = sum(4 * prod(shape) for name, shape in checkpoint.shapes.items() if "layers" in name and len(shape) == 1)
    planned = copy_bytes(checkpoint, 4) - norms
    assert found == [pytest.approx(planned, abs=4096)]  # each matrix ends with up to 1024 bytes of room


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_drafts_are_drawn_as_tokens_are(tiny_checkpoint: Path, sampling: Sampling) -> None:
    """Every draft of a copy of the model is accepted, because noise, filters, rules and masks depend on the
    position."""
    driver = Driver(tiny_checkpoint, **SELF)
    draft_by(driver, driver.worker.runner.eager)
    given = generate(driver, sampling)
    assert given == [4] * len(given)


@pytest.mark.parametrize("sampling", [GREEDY, MASKED], ids=["greedy", "masked"])
@pytest.mark.parametrize("eager", [False, True], ids=["programs", "eager"])
@pytest.mark.parametrize("name", KINDS)
def test_drafts_of_a_hybrid_continue_from_its_states(
    name: str, eager: bool, sampling: Sampling, tmp_path: Path
) -> None:
    """A draft model that is a copy has every draft accepted; the copy in 4 bits changes no token, and no state."""
    path = KINDS[name].make(tmp_path / "model")
    found: list[tuple[list[int], torch.Tensor]] = []
    for settings, is_exact in (({}, False), (SELF, True), (SELF, False)):
        driver = Driver(path, enforce_eager=eager, **settings)
        if is_exact:
            draft_by(driver, driver.worker.runner.eager)
        given = generate(driver, sampling, num_drafts=3 if settings else 0, states=PLACES)
        if is_exact:
            assert given == [4] * len(given)
        found.append((driver.got[0][:20], driver.worker.runner.cache_engine.states[2].clone()))
        assert found[-1][0] == found[0][0]
        if len(driver.got[0]) == len(found[0][0]):
            torch.testing.assert_close(found[-1][1], found[0][1], atol=1e-4, rtol=1e-4)


def test_more_sequences_than_scratch_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "SCRATCH_STATES", 1)
    driver = Driver(HYBRIDS[0].make(tmp_path / "model"), **SELF)
    assert driver.worker.scratch == range(driver.worker.num_state_slots, driver.worker.num_state_slots + 1)
    driver.run(new_request(1, PROMPT[:5], [20, 21]), new_request(0, PROMPT, [1, 2, 3]), *PLACES)
    draft_by(driver, driver.worker.runner.eager)
    assert driver.run(Draft(0, 3, []), Draft(1, 3, [])).drafted == [3, 0]
    assert driver.run(Draft(1, 3, []), Continue(0, 1, [])).drafted == [3, 0]
    assert [len(driver.got[handle]) for handle in (0, 1)] == [6, 6]


def test_a_plan_counts_the_copy_and_the_scratch_states_of_a_hybrid(tmp_path: Path) -> None:
    path = HYBRIDS[0].make(tmp_path / "model")
    settings: dict[str, Any] = {"model": str(path), "device": "cpu", "memory": "4GiB", "max_num_seqs": 8}
    given, of_model = PlanConfig.load(settings, env={}), load(PlanConfig(model=str(path)))
    alone = make_plan(given, of_model)
    plan = make_plan(PlanConfig.load(settings | SELF, env={}), of_model)
    driver = Driver(path, dtype="bfloat16", **SELF)
    assert plan.num_state_slots - alone.num_state_slots == len(driver.worker.scratch) == 8
    assert len(driver.worker.runner.cache_engine.states) == plan.num_state_slots
    assert plan.weights_bytes - alone.weights_bytes == copy_bytes(of_model, 4)


def test_drafts_follow_forced_tokens(tiny_checkpoint: Path) -> None:
    driver = Driver(tiny_checkpoint, **SELF)
    driver.rules.mask_source_of = lambda _: ChainMask(384)
    draft_by(driver, driver.worker.runner.eager)
    generate(driver, msgspec.structs.replace(WARM, rules=LogitRules()), num_drafts=0)
    plain = driver.got[0]
    driver.run(Finish(0), Finish(1))
    given = generate(driver, msgspec.structs.replace(WARM, rules=LogitRules()), num_drafts=5)
    assert driver.got[0][:20] == plain[:20]
    assert given == [6] * len(given), "three forced tokens, and drafts behind them"


def test_each_sequence_has_its_own_number_of_drafts(tiny_checkpoint: Path) -> None:
    driver = Driver(tiny_checkpoint, **SELF)
    driver.run(new_request(1, PROMPT[:5], [20, 21, 22]), new_request(0, PROMPT, [1, 2, 3, 4]))
    assert driver.run(Draft(0, 3, []), Draft(1, 1, [])).drafted == [3, 1]
    assert driver.run(Draft(1, 2, []), Continue(0, 1, [])).drafted == [2, 0]


def test_nothing_is_written_that_the_cache_holds(tiny_checkpoint: Path) -> None:
    """A position below `num_cached` is in a block that other sequences may read."""
    driver = Driver(tiny_checkpoint, **SELF)
    driver.run(new_request(0, PROMPT, [1, 2, 3, 4]))
    rows, seen = driver.worker.runner.batch.rows, list[tuple[int, ...]]()
    rows.num_cached[0] = len(PROMPT) + 1  # the last token's position, which the step computes once more
    eager = drafter_of(driver).eager
    hidden = eager.hidden

    def watched(inputs: Any) -> torch.Tensor:
        seen.append(tuple(inputs.slot_mapping[0].tolist()))
        return hidden(inputs)

    draft_by(driver, type("Watched", (), {"logits": lambda _, inputs: eager.head(watched(inputs))})())
    driver.run(Draft(0, 2, []))
    assert seen == [(-1,), (2 * 16 + 15,)]


def test_a_fork_and_its_parent_draft_apart(tiny_checkpoint: Path) -> None:
    driver = Driver(tiny_checkpoint, **SELF)
    both = []
    for draws in (False, True):
        driver.got = {}
        driver.run(new_request(0, PROMPT, [1, 2, 3, 4], sampling=WARM))
        other = msgspec.structs.replace(WARM, sample=1)
        driver.run(
            Fork(0, 1, other, 31, 30, 0),
            ReplaceBlock(1, 0, 1, 10),
            Continue(0, 1, []),
            Continue(1, 1, [[11]]),
            ops=((BlockOp.COPY, 2, 10),),
        )
        while min(len(driver.got[0]), len(driver.got[1])) < 12:
            driver.run(*(Draft(handle, 3, []) if draws else Continue(handle, 1, []) for handle in (0, 1)))
        both.append((driver.got[0][:12], driver.got[1][:12]))
        driver.run(Finish(0), Finish(1))
    assert both[0] == both[1]


def test_parts_that_look_up_are_the_models_own(tmp_path: Path) -> None:
    for quantization, tied in ((None, True), (None, False), ("int8", True), ("int8", False)):
        path = make_checkpoint(tmp_path / f"{quantization}{tied}", tie_word_embeddings=tied)
        driver = Driver(path, quantization=quantization, **SELF)
        copy: Any = drafter_of(driver)._copy
        model: Any = driver.worker.model
        assert copy.embedding is model.embedding
        assert copy.norm is model.norm
        assert copy.lm_head is not model.lm_head
        assert (model.lm_head.quantization, copy.lm_head.quantization) == (quantization, "int4_g32")
        assert model.lm_head.tied == tied


@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
def test_a_gguf_file_drafts_for_itself(kind: str, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "model", "llama")
    path = write_gguf(tmp_path / "model.gguf", source, lambda _: kind)
    plain = Driver(path)
    generate(plain, WARM, num_drafts=0)
    driver = Driver(path, **SELF)
    assert max(generate(driver, WARM)) > 1
    assert driver.got[0][:20] == plain.got[0][:20]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"quantization": "int4"}, "its weights have 4 bits already"),
        ({"model_impl": "transformers"}, "its code is that of transformers"),
    ],
)
def test_models_that_cannot_say_why(settings: dict[str, Any], why: str, tiny_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        Driver(tiny_checkpoint, **settings, **SELF)


def test_a_draft_that_cannot_be_drawn_ends_the_drafts(tiny_checkpoint: Path) -> None:
    driver = Driver(tiny_checkpoint, **SELF)
    chain: Any = drafter_of(driver).chain
    forward, calls = chain.forward, list[int]()

    def poisoned(inputs: Any) -> torch.Tensor:
        logits: torch.Tensor = forward.logits(inputs)
        calls.append(len(logits))
        if len(calls) == 2:
            logits[0] = float("nan")
        return logits

    draft_by(driver, type("Poisoned", (), {"logits": lambda _, inputs: poisoned(inputs)})())
    driver.run(new_request(1, PROMPT[:5], [20, 21, 22]), new_request(0, PROMPT, [1, 2, 3, 4]))
    assert driver.run(Draft(0, 3, []), Draft(1, 3, [])).drafted == [1, 3]
    assert calls == [2, 2, 1]
    assert np.isfinite(driver.worker.runner.batch.rows.num_tokens).all()


def test_verification_is_replayed_beside_sequences_that_draft_nothing(tiny_checkpoint: Path) -> None:
    driver, eager = Driver(tiny_checkpoint, **SELF), Driver(tiny_checkpoint, enforce_eager=True, **SELF)
    for each in (driver, eager):
        each.run(new_request(1, PROMPT[:5], [20, 21]), new_request(0, PROMPT, [1, 2, 3]))
    graphs: Any = driver.worker.runner.forward
    before = graphs.num_replays
    for each in (driver, eager):
        each.run(Draft(0, 3, []), Continue(1, 1, []))
        each.run(Draft(1, 1, []), Draft(0, 2, []))
    assert graphs.num_replays == before + 2
    assert driver.got == eager.got
    driver.run(Draft(0, 3, []), Draft(1, 3, []), new_request(2, PROMPT[:3], [30]))
    assert graphs.num_replays == before + 2, "a prompt is not a decode"
