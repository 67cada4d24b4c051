"""ModelRunner driven by hand-written steps on a tiny checkpoint; transformers says which tokens are right."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.driver import BLOCK, GENERATION, GREEDY, NUM_BLOCKS, WARM, Driver, expected, make_prompt, new_request
from vllm_lite.errors import ProtocolError
from vllm_lite.kernels import cpu
from vllm_lite.protocol.step import (
    BlockOp,
    Continue,
    Finish,
    Fork,
    Preempt,
    ReplaceBlock,
    Resume,
    SchedulerOutput,
    SetToken,
)
from vllm_lite.worker import forward
from vllm_lite.worker.batch.step_inputs import StepInputs
from vllm_lite.worker.step_parts import prompt_scores

# ---- the same tokens as transformers


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 128])
def test_whole_prompts(driver: Driver, oracle: Any, length: int) -> None:
    prompt = make_prompt(length)
    driver.run(new_request(0, prompt, list(range(9, 19))))
    driver.decode(0, count=11)
    assert driver.got[0] == expected(oracle, prompt, 12)


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_prompts_in_chunks(driver: Driver, oracle: Any, chunk: int) -> None:
    prompt, blocks = make_prompt(70), [4, 3, 2, 1, 20]
    owned = -(-chunk // BLOCK)
    driver.run(new_request(0, prompt, blocks[:owned], num_tokens=chunk))
    for start in range(chunk, len(prompt), chunk):
        end = min(start + chunk, len(prompt))
        needed = -(-end // BLOCK)
        driver.run(Continue(0, end - start, [blocks[owned:needed]] if needed > owned else []))
        owned = needed
    driver.decode(0, count=9)
    assert driver.got[0] == expected(oracle, prompt, 10)


def test_prefill_and_decode_side_by_side(driver: Driver, oracle: Any) -> None:
    prompts = [make_prompt(length, seed=1) for length in (40, 3, 33)]
    driver.run(new_request(0, prompts[0], [1, 2, 3, 4], num_tokens=25), new_request(1, prompts[1], [5, 6]))
    driver.run(Continue(1, 1, []), new_request(2, prompts[2], [7, 8, 9], num_tokens=1), Continue(0, 14, []))
    driver.run(Continue(2, 32, []), Continue(0, 1, []), Continue(1, 1, []))
    driver.decode(2, 0, 1, count=6)
    for handle, prompt in enumerate(prompts):
        assert driver.got[handle] == expected(oracle, prompt, 9)[: len(driver.got[handle])]
    assert [len(driver.got[handle]) for handle in range(3)] == [7, 9, 7]


def test_preempted_and_resumed_in_other_blocks(driver: Driver, oracle: Any) -> None:
    prompts = [make_prompt(length, seed=2) for length in (30, 20)]
    driver.run(new_request(0, prompts[0], [1, 2, 3]), new_request(1, prompts[1], [4, 5]))
    driver.decode(0, 1, count=4)
    driver.run(Preempt(0), Continue(1, 1, []))
    driver.run(new_request(2, make_prompt(40, seed=9), [2, 1, 3]), Continue(1, 1, []))  # overwrites its blocks
    driver.run(Finish(2), Resume(0, 0, 0, 20, [[11, 3, 10]]), Continue(1, 1, []))
    driver.run(Continue(0, 15, []), Continue(1, 1, []))
    driver.decode(1, 0, count=3)
    assert driver.got[0] == expected(oracle, prompts[0], 9)
    assert driver.got[1] == expected(oracle, prompts[1], 12)


@pytest.mark.parametrize("copied", [True, False], ids=["copied", "control: not copied"])
def test_a_fork_with_a_copy_of_the_shared_tail(driver: Driver, oracle: Any, copied: bool) -> None:
    """Two children of 20 tokens prefilled once share the first block; the second is copied before it is written."""
    prompt = make_prompt(21, seed=3)
    driver.run(new_request(0, prompt, [1, 2], num_tokens=20))
    ops = ((int(BlockOp.COPY), 2, 7),) if copied else ()
    replaced = ReplaceBlock(1, 0, 1, 7)
    driver.run(Fork(0, 1, GREEDY, 21, 20, 20), replaced, Continue(0, 1, []), Continue(1, 1, []), ops=ops)
    for child in (2, 3, 4):  # their last token is cached: nothing is written
        warm = msgspec.structs.replace(WARM, sample=child)
        driver.run(Fork(0, child, warm, 21, 20, 21), Continue(child, 1, []))
    driver.decode(1, 0, count=9)
    want = expected(oracle, prompt, 10)
    assert driver.got[0] == want
    assert (driver.got[1] == want) is copied
    assert len({driver.got[child][0] for child in (2, 3, 4)}) > 1, "each child draws for itself"


def test_samples_of_one_prompt_share_it_in_the_step_that_computes_it(driver: Driver, oracle: Any) -> None:
    """As the engine does it: the parent writes the tail that the child reads in the same step."""
    prompt = make_prompt(20, seed=3)
    driver.run(new_request(0, prompt, [1, 2]), Fork(0, 1, GREEDY, 20, 19, 20), Continue(1, 1, []))
    driver.run(ReplaceBlock(0, 0, 1, 5), Continue(0, 1, []), Continue(1, 1, []), ops=((int(BlockOp.COPY), 2, 5),))
    driver.decode(1, 0, count=8)
    assert driver.got[0] == driver.got[1] == expected(oracle, prompt, 10)


def test_a_token_that_the_engine_chose(driver: Driver, oracle: Any) -> None:
    prompt = make_prompt(20, seed=3)
    for handle, blocks in ((0, [1, 2]), (1, [3, 4])):
        driver.run(new_request(handle, prompt, blocks))
    driver.run(SetToken(0, 77), Continue(0, 1, []), Preempt(1), SetToken(1, 77))
    driver.run(Continue(0, 1, []), Resume(1, 0, 0, 21, [[5, 6]]))
    driver.decode(0, 1, count=3)
    assert driver.got[0][1:] == expected(oracle, [*prompt, 77], 5)
    assert driver.got[1][1:] == expected(oracle, [*prompt, 77], 4)


# ---- swapping


@pytest.mark.parametrize("swapped", [True, False], ids=["swapped", "control: overwritten"])
def test_swapped_out_overwritten_and_swapped_in_elsewhere(tiny_checkpoint: Path, oracle: Any, swapped: bool) -> None:
    driver = Driver(tiny_checkpoint, num_host_blocks=8)
    assert driver.started.swap_blocks_per_s > 0
    prompt, host = make_prompt(40, seed=2), NUM_BLOCKS
    driver.run(new_request(0, prompt, [1, 2, 3]))
    driver.decode(0, count=4)
    out = tuple((int(BlockOp.SWAP_OUT), block, host + 2 * block) for block in (1, 2, 3))
    driver.run(Preempt(0), new_request(1, make_prompt(45, seed=9), [2, 3, 1]), ops=out)
    driver.run(Continue(1, 1, []))
    back = tuple((int(BlockOp.SWAP_IN), host + 2 * block, 10 - block) for block in (1, 2, 3))
    ids = [[9, 8, 7]] if swapped else [[1, 2, 3]]
    driver.run(Finish(1), Resume(0, 44, 44, 1, ids), ops=back)
    driver.decode(0, count=3)
    assert (driver.got[0] == expected(oracle, prompt, 9)) is swapped


def test_a_whole_prompt_hit_reads_the_cache_and_changes_no_bit_of_it(driver: Driver, oracle: Any) -> None:
    prompt = make_prompt(32, seed=4)
    driver.run(new_request(0, prompt, [1, 2]))
    before = driver.pool.clone()
    driver.run(new_request(1, prompt, [1, 2], num_computed=31, num_cached=32, num_tokens=1))
    assert torch.equal(driver.pool.view(torch.uint8), before.view(torch.uint8))
    driver.run(Finish(0), Continue(1, 1, [[3]]))
    driver.decode(1, count=8)
    assert driver.got[1] == expected(oracle, prompt, 10)


def test_a_damaged_block_changes_the_tokens(driver: Driver, oracle: Any) -> None:
    """The control of all of the above: these tokens do depend on the cache."""
    prompt = make_prompt(40, seed=5)
    driver.run(new_request(0, prompt, [1, 2, 3, 4]))
    driver.pool[1] = driver.pool[2]
    driver.decode(0, count=11)
    assert driver.got[0] != expected(oracle, prompt, 12)


def test_logprobs_match_transformers(driver: Driver, oracle: Any) -> None:
    prompt = make_prompt(50, seed=6)
    output = driver.run(
        new_request(0, prompt, [1, 2, 3, 4], sampling=msgspec.structs.replace(WARM, logprobs=5)),
        new_request(1, prompt[:20], [5, 6]),
    )
    with torch.inference_mode():
        logprobs = oracle(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    assert output.logprobs is not None
    report, nothing = output.logprobs
    assert nothing is None
    assert report is not None
    values, ids = logprobs.topk(5)
    assert [token for token, _ in report.top] == ids.tolist()
    assert [value for _, value in report.top] == pytest.approx(values.tolist(), abs=1e-4)
    assert report.logprob == pytest.approx(logprobs[driver.got[0][0]].item(), abs=1e-4)


# ---- sampling


def test_a_seed_draws_the_same_whatever_happens_around_it(tiny_checkpoint: Path) -> None:
    prompt = make_prompt(30, seed=7)

    def alone(driver: Driver) -> None:
        driver.run(new_request(5, prompt, [1, 2, 3], sampling=WARM))
        driver.decode(5, count=9)

    def in_chunks_and_company(driver: Driver) -> None:
        first = new_request(5, prompt, [1, 2, 3], num_tokens=11, sampling=WARM)
        driver.run(new_request(1, make_prompt(9), [9], sampling=WARM), first)
        driver.run(Continue(5, 19, []), Continue(1, 1, []))
        driver.run(Preempt(1), Continue(5, 1, []))
        driver.run(Preempt(5), Resume(1, 0, 0, 11, [[20]]))
        driver.run(Resume(5, 0, 0, 32, [[4, 5, 6]]), Finish(1))
        driver.decode(5, count=7)

    def as_another_child(driver: Driver) -> None:
        driver.run(new_request(5, prompt, [1, 2, 3], sampling=msgspec.structs.replace(WARM, sample=1)))
        driver.decode(5, count=9)

    results = []
    for play in (alone, in_chunks_and_company, as_another_child):
        driver = Driver(tiny_checkpoint)
        play(driver)
        results.append(driver.got[5])
    assert results[0] == results[1]
    assert results[0] != results[2]


def test_stop_ids_wait_for_min_tokens(driver: Driver, oracle: Any) -> None:
    prompt = make_prompt(20, seed=8)
    free = expected(oracle, prompt, 4)
    ruled = msgspec.structs.replace(GREEDY, min_tokens_until=21, stop_ids=(free[0],))
    driver.run(new_request(0, prompt, [1, 2], sampling=ruled))
    assert driver.got[0][0] != free[0]
    later = msgspec.structs.replace(GREEDY, min_tokens_until=20, stop_ids=(free[0],))
    driver.run(new_request(1, prompt, [3, 4], sampling=later))
    assert driver.got[1] == free[:1]


def test_a_sequence_with_infinite_or_nan_logits_fails_alone(
    driver: Driver, oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [make_prompt(length, seed=9) for length in (10, 11, 12)]
    logits = driver.worker.runner.forward.logits

    def poisoned(inputs: StepInputs) -> torch.Tensor:
        result = logits(inputs)
        result[1, 5] = float("nan")
        return result

    monkeypatch.setattr(driver.worker.runner.forward, "logits", poisoned)
    output = driver.run(*(new_request(handle, prompt, [1 + handle]) for handle, prompt in enumerate(prompts)))
    assert [handle for handle, _ in output.failed or ()] == [1]
    assert "not finite" in (output.failed or [])[0][1]
    monkeypatch.undo()
    driver.run(Finish(1), Continue(0, 1, []), Continue(2, 1, []))
    for handle in (0, 2):
        assert driver.got[handle] == expected(oracle, prompts[handle], 2)


# ---- steps as such


def test_ready_has_the_facts_that_the_engine_needs(driver: Driver) -> None:
    ready = driver.ready
    assert (ready.num_blocks, ready.vocab_size, ready.eos_token_ids) == (NUM_BLOCKS, 384, (2,))
    assert (ready.max_model_len, [group.kind for group in ready.groups]) == (512, ["full"])
    assert ready.block_bytes == driver.pool[0].numel() * 4
    assert (ready.kernels["instruction set"], ready.kernels["attention"]) == (cpu.isa(), "CpuBackend")
    assert re.fullmatch(r"\d+ x float32", ready.kernels["matrices"])


def test_warming_up_writes_nothing(driver: Driver) -> None:
    driver.pool[1:].normal_()
    before = driver.pool.clone()
    driver.worker.runner.warm_up()
    assert torch.equal(driver.pool, before)


def test_a_step_without_tokens_still_answers(driver: Driver) -> None:
    driver.run(new_request(0, [5, 6, 7], [1]))
    count = driver.progress.count
    output = driver.run(Finish(0))
    assert (output.tokens, output.logprobs, output.failed) == (b"", None, None)
    assert driver.progress.count == count + 1
    assert driver.run().tokens == b""


def test_a_chunk_that_samples_nothing_answers_nothing(driver: Driver) -> None:
    assert driver.run(new_request(0, make_prompt(20), [1, 2], num_tokens=5)).tokens == b""


def test_progress_grows_in_every_layer(tiny_checkpoint: Path) -> None:
    """Replayed steps are small, and show none."""
    driver = Driver(tiny_checkpoint, enforce_eager=True)
    count = driver.progress.count
    driver.run(new_request(0, [5, 6, 7], [1]))
    assert driver.progress.count == count + 2 + 1 + 1, "two layers, the head and the step"


def test_progress_grows_while_a_large_head_works(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are scored, and rows sampled, in such small parts that progress is visible in each heartbeat."""
    driver = Driver(tiny_checkpoint, enforce_eager=True)
    prompt = make_prompt(41, seed=6)
    scored = msgspec.structs.replace(GREEDY, prompt_logprobs=0)
    monkeypatch.setattr(prompt_scores, "LOGITS_AT_ONCE", 4 * driver.worker.runner.model.spec.vocab_size)
    monkeypatch.setattr(forward, "HEAD_ROWS", 2)
    count = driver.progress.count
    driver.run(new_request(0, prompt, [1, 2, 3], sampling=scored))
    assert driver.progress.count == count + 2 + 40 // 4 + 1 + 1, "layers, scores, the head, the step"
    count = driver.progress.count
    driver.run(*(new_request(handle, prompt[:5], [10 + handle]) for handle in range(1, 6)))
    assert driver.progress.count == count + 2 + 3 + 1, "five rows of which two are multiplied at once"


def test_rows_that_the_head_multiplies_in_turn_have_the_same_logits(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = driver.worker.runner.eager
    hidden = torch.randn(5, driver.worker.runner.model.spec.hidden_size)
    whole = eager.head(hidden).clone()
    monkeypatch.setattr(forward, "HEAD_ROWS", 2)
    assert torch.allclose(eager.head(hidden), whole, atol=1e-5)


def test_a_step_of_another_generation_is_refused(driver: Driver) -> None:
    with pytest.raises(ProtocolError, match="generation 4, this worker's is 3"):
        driver.worker.execute(SchedulerOutput(GENERATION + 1, 1, [], []))


def test_a_step_beyond_the_budget_is_refused(driver: Driver) -> None:
    with pytest.raises(ProtocolError, match="129 tokens, expected at most 128"):
        driver.run(new_request(0, make_prompt(129), list(range(1, 10))))
