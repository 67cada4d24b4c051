"""Grammars in the worker: sequences that wait for theirs alone, drafts over the end of thinking, several ranks."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.batches import part_of
from tests.checkpoints import VOCAB_SIZE
from tests.cpu.test_model_runner_drafts import Parrot
from tests.cpu.test_ranked_runner import on_ranks
from tests.deadlines import scaled
from tests.driver import GREEDY, WARM, Driver, make_prompt, new_request
from tests.families.hybrid import VARIANTS as HYBRIDS
from tests.parity_mask import ParityMask
from tests.thread_group import ThreadGroup
from vllm_lite.errors import GrammarError
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.params import LogitRules, Sampling
from vllm_lite.protocol.step import Continue, Draft, Finish, Fork, ModelOutput, Preempt, Resume, SchedulerOutput, States
from vllm_lite.protocol.structured import Thinking
from vllm_lite.structured.sources.grammars import Grammars
from vllm_lite.structured.sources.vocabulary import Vocabulary, load_vocabulary
from vllm_lite.worker.sampling import readiness
from vllm_lite.worker.sampling.masks import CONTRADICTION, Uint32s
from vllm_lite.worker.step_parts.rules import Rules

PROMPT = make_prompt(20, seed=8)
DIGITS = "%llguidance {}\nstart: /([0-9]{2},){3}[0-9]/\n"
MASKED = msgspec.structs.replace(GREEDY, rules=LogitRules(repetition_penalty=1.2))


@pytest.fixture(scope="module")
def vocabulary(tiny_checkpoint: Path) -> Vocabulary:
    return load_vocabulary(tiny_checkpoint, 384, (2,))


def guided(sampling: Sampling = GREEDY, **rules: Any) -> Sampling:
    return msgspec.structs.replace(sampling, rules=LogitRules(**{"grammar": DIGITS, **rules}))


@pytest.fixture
def driver(tiny_checkpoint: Path, vocabulary: Vocabulary) -> Driver:
    """A worker whose grammars are compiled already."""
    driver = Driver(tiny_checkpoint, max_num_batched_tokens=256)
    use(driver, vocabulary)
    return driver


def use(driver: Driver, vocabulary: Vocabulary) -> None:
    grammars = Grammars(lambda: vocabulary)

    def at_once(sampling: Sampling) -> Any:
        source = grammars.source_of(sampling)
        return source.result(scaled(20)) if isinstance(source, Future) else source

    driver.rules.mask_source_of = at_once


def text_of(vocabulary: Vocabulary, tokens: list[int]) -> str:
    text: str = vocabulary.tokenizer.decode_str(tokens)
    return text


# ---- sequences that wait for their grammar


@pytest.fixture
def later(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Driver, list[Future[ParityMask]]]:
    """A worker whose sequences with rules wait for the futures in the list."""
    monkeypatch.setattr(readiness, "PATIENCE_S", 0.0)
    driver, futures = Driver(tiny_checkpoint), list[Future[ParityMask]]()

    def source_of(_sampling: Sampling) -> Future[ParityMask]:
        futures.append(Future())
        return futures[-1]

    driver.rules.mask_source_of = source_of
    return driver, futures


def uninterrupted(checkpoint: Path, sampling: Sampling, count: int) -> list[int]:
    driver = Driver(checkpoint)
    driver.rules.mask_source_of = lambda _: ParityMask(384)
    driver.run(new_request(0, PROMPT, [1, 2, 3], sampling=sampling))
    driver.decode(0, count=count - 1)
    return driver.got[0]


@pytest.mark.parametrize(
    "sampling", [MASKED, msgspec.structs.replace(WARM, rules=MASKED.rules)], ids=["greedy", "drawn"]
)
def test_a_sequence_that_waits_for_a_grammar_does_not_affect_others(
    later: tuple[Driver, list[Future[ParityMask]]], tiny_checkpoint: Path, sampling: Sampling
) -> None:
    driver, futures = later
    expected = uninterrupted(tiny_checkpoint, sampling, 6)
    output = driver.run(new_request(1, PROMPT[:7], [4, 5, 6]), new_request(0, PROMPT, [1, 2, 3], sampling=sampling))
    assert output.counts == [1, 0]
    kv = driver.pool[2].clone()
    for _ in range(3):
        driver.pool[2] = 0
        output = driver.run(Continue(0, 1, []), Continue(1, 1, []))
        assert output.counts == [0, 1]
        assert not driver.pool[2].any(), "its last position is not written again"
        driver.pool[2] = kv
    driver.run(Draft(0, 3, []), Continue(1, 1, []))
    assert driver.got[0] == []
    futures[0].set_result(ParityMask(384))
    driver.decode(0, 1, count=6)
    assert driver.got[0] == expected
    alone = Driver(tiny_checkpoint)
    alone.run(new_request(1, PROMPT[:7], [4, 5, 6]))
    alone.decode(1, count=10)
    assert driver.got[1] == alone.got[1]


def test_a_sequence_that_waits_is_preempted_resumed_forked_and_finished(
    later: tuple[Driver, list[Future[ParityMask]]], tiny_checkpoint: Path
) -> None:
    driver, futures = later
    expected = uninterrupted(tiny_checkpoint, MASKED, 5)
    driver.run(new_request(0, PROMPT, [1, 2, 3], sampling=MASKED))
    driver.run(Preempt(0), new_request(1, PROMPT, [4, 5, 6], sampling=MASKED))
    driver.run(Resume(0, 0, 0, 20, [[7, 8, 9]]), Continue(1, 1, []))
    driver.run(Fork(0, 2, MASKED, 20, 19, 20), Continue(2, 1, []), Continue(0, 1, []))
    assert [driver.got[handle] for handle in (0, 1, 2)] == [[], [], []]
    driver.run(Finish(1))
    futures[2].set_result(ParityMask(384))
    driver.run(Continue(2, 1, []), Continue(0, 1, []))
    assert (driver.got[2], driver.got[0]) == (expected[:1], [])
    driver.run(Finish(2))
    futures[0].set_result(ParityMask(384))
    driver.decode(0, count=5)
    assert driver.got[0] == expected


def test_a_grammar_that_cannot_be_compiled_fails_its_sequence_alone(
    later: tuple[Driver, list[Future[ParityMask]]],
) -> None:
    driver, futures = later
    driver.run(new_request(0, PROMPT, [1, 2, 3], sampling=MASKED), new_request(1, PROMPT, [4, 5, 6]))
    futures[0].set_exception(GrammarError("it has no sense"))
    output = driver.run(Continue(0, 1, []), Continue(1, 1, []))
    assert output.failed == [(0, "it has no sense")]


def test_a_grammar_that_runs_into_its_limits_fails_its_sequence_alone(driver: Driver) -> None:
    class Exhausted(ParityMask):
        def accept(self, token: int) -> bool:
            if len(self.output) == 2:
                raise GrammarError("too much work")
            self.output.append(token)
            return True

    driver.rules.mask_source_of = lambda _: Exhausted(384)
    driver.run(new_request(0, PROMPT, [1, 2, 3], sampling=MASKED), new_request(1, PROMPT, [4, 5, 6]))
    driver.decode(0, 1, count=2)
    output = driver.run(Continue(0, 1, []), Continue(1, 1, []))
    assert output.failed == [(0, "too much work")]


@pytest.mark.parametrize("shares_memory", [True, False], ids=["one memory", "copies"])
def test_ranks_agree_on_when_a_grammar_is_there(tiny_checkpoint: Path, shares_memory: bool) -> None:
    """Each rank has it at another time; a sequence gets its first token when the last one has it."""
    step = 0

    def message(*entries: Any) -> tuple[SchedulerOutput, ModelOutput]:
        nonlocal step
        step += 1
        return SchedulerOutput(3, step, [], list(entries)), ModelOutput(3, step, b"")

    both = Continue(0, 1, []), Continue(1, 1, [])
    first = new_request(0, PROMPT, [1, 2, 3], sampling=MASKED), new_request(1, PROMPT[:7], [4, 5, 6])
    messages = [message(*first), *(message(*both) for _ in range(8))]

    def begin(runner: Any, rank: int) -> None:
        future: Future[ParityMask] = Future()
        part_of(runner, Rules).mask_source_of = lambda _: future
        executed, execute = [0], runner.execute

        def counted(output: SchedulerOutput) -> ModelOutput:
            executed[0] += 1
            if executed[0] == 2 + 3 * rank:
                future.set_result(ParityMask(384))
            answer: ModelOutput = execute(output)
            return answer

        runner.execute = counted

    by_rank = on_ranks(tiny_checkpoint, messages, ThreadGroup(2, shares_memory=shares_memory), begin=begin)
    assert [output.tokens for output in by_rank[0]] == [output.tokens for output in by_rank[1]]
    assert [output.counts for output in by_rank[0]] == [[0, 1]] * 4 + [None] * 5
    alone = Driver(tiny_checkpoint)
    alone.rules.mask_source_of = lambda _: ParityMask(384)
    alone.run(*first)
    alone.decode(0, 1, count=4)
    got = np.concatenate([np.frombuffer(output.tokens, "<u4") for output in by_rank[0][4:]]).reshape(-1, 2)
    assert got[:, 0].tolist() == alone.got[0]


class OnlyEight(ParityMask):
    """Allows one token, again and again."""

    def fill_bitmask(self, bitmask: Uint32s) -> None:
        bitmask[:] = 0
        bitmask[0] = 1 << 8


@pytest.mark.parametrize("comes", [True, False])
def test_a_step_of_states_waits_for_a_grammar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes: bool) -> None:
    """A recurrent state cannot take a token twice, so no sequence gets a token before the grammar is compiled or has
    failed."""
    path, prompt = HYBRIDS[0].make(tmp_path / "hybrid"), [token % VOCAB_SIZE for token in PROMPT]
    driver, future = Driver(path), Future[OnlyEight]()
    waited: list[int] = []

    def wait(coming: list[Future[OnlyEight]], *_args: object, **_options: object) -> None:
        waited.append(len(coming))
        if comes and len(waited) == 7:
            future.set_result(OnlyEight(VOCAB_SIZE))

    monkeypatch.setattr(readiness, "wait", wait)
    monkeypatch.setattr(readiness, "MAX_ROUNDS", 20)
    driver.rules.mask_source_of = lambda _: future
    before = driver.progress.count
    first = driver.run(new_request(0, prompt, [1, 2, 3], sampling=MASKED), States(0, 0, 1, []))
    assert len(waited) == (7 if comes else 20)
    assert driver.progress.count >= before + len(waited)
    if comes:
        driver.decode(0, count=5)
        assert driver.got[0] == [8] * 6
    else:
        assert first.failed == [(0, readiness.TOO_LATE)]


# ---- with everything else


def test_an_output_follows_its_grammar_and_ends(driver: Driver, vocabulary: Vocabulary) -> None:
    driver.run(
        new_request(0, PROMPT, [1, 2, 3], sampling=guided()), new_request(1, PROMPT, [4, 5, 6], sampling=guided(WARM))
    )
    driver.decode(0, 1, count=14)
    for tokens in driver.got.values():
        end = tokens.index(2)
        text = text_of(vocabulary, tokens[:end])
        assert [len(part) for part in text.split(",")] == [2, 2, 2, 1]
        assert set(tokens[end:]) == {2}, "only ends follow an end, where they are ignored"


def test_drafts_that_run_over_the_end_of_thinking_change_nothing(driver: Driver, vocabulary: Vocabulary) -> None:
    """Right and wrong drafts over the beginning and the end of thinking, the grammar and its end."""
    for budget in (0, 1, 4, None):
        thinking = Thinking(end=(7, 9), begin=(11,), is_open=True, budget=budget)
        bias = ((7, 4.0), (9, 4.0)) if budget is None else ()
        sampling = guided(WARM, thinking=thinking, bias=bias)
        driver.got.clear()
        driver.drafts.drafter = None
        driver.run(new_request(0, PROMPT, [1, 2, 3, 4, 5], sampling=sampling))
        driver.decode(0, count=29)
        driver.run(Finish(0))
        expected = driver.got.pop(0)
        if budget is not None:
            end = expected.index(7, budget)
            assert end <= budget
            assert expected[budget - 0 : budget + 2] == [7, 9] or expected[:budget][-1:] == [7]
            inner = expected[expected.index(9, max(0, budget - 1)) + 1 :]
            assert text_of(vocabulary, inner[: inner.index(2)]).count(",") == 3
        for wrong in ((), (21, 23), (24, 25, 31), tuple(range(20, 48, 3))):
            driver.drafts.drafter = Parrot(PROMPT + expected + [0] * 9, wrong)
            driver.run(new_request(0, PROMPT, [1, 2, 3, 4, 5], sampling=sampling))
            while len(driver.got[0]) < 30:
                driver.run(Draft(0, 5, []))
            driver.run(Finish(0))
            assert driver.got.pop(0)[:30] == expected


def test_preemption_and_forks_in_the_middle_of_a_grammar(driver: Driver, vocabulary: Vocabulary) -> None:
    thinking = Thinking(end=(7,), begin=(11,), is_open=True, budget=2)
    sampling = guided(thinking=thinking, presence_penalty=0.5)
    driver.run(new_request(9, PROMPT, [30, 31, 32], sampling=sampling))
    driver.decode(9, count=15)
    driver.run(Finish(9))
    expected = driver.got.pop(9)
    for at in (1, 2, 3, 6, 13):
        driver.run(new_request(0, PROMPT, [1, 2, 3], sampling=sampling))
        driver.decode(0, count=at)
        driver.run(Preempt(0))
        driver.run(Resume(0, 0, 0, 21 + at, [[7, 8, 9]]))
        length = 20 + len(driver.got[0])
        driver.run(Fork(0, 1, sampling, length, length - 1, length), Continue(1, 1, []), Continue(0, 1, []))
        assert driver.got.pop(1) == expected[at + 2 : at + 3]
        driver.decode(0, count=15 - at - 2)
        driver.run(Finish(0), Finish(1))
        assert driver.got.pop(0) == expected[:16]


def test_min_tokens_give_in_where_a_grammar_leaves_only_its_end(driver: Driver, vocabulary: Vocabulary) -> None:
    waiting = msgspec.structs.replace(guided(), min_tokens_until=60, stop_ids=(2,))
    driver.run(new_request(0, PROMPT, [1, 2, 3], sampling=waiting))
    driver.decode(0, count=14)
    assert driver.got[0][-1] == 2
    many = "%llguidance {}\nstart: /[0-9]*/\n"
    waiting = msgspec.structs.replace(guided(grammar=many, bias=((2, 90.0),)), min_tokens_until=30, stop_ids=(2,))
    driver.run(new_request(1, PROMPT, [4, 5, 6], sampling=waiting))
    driver.decode(1, count=11)
    assert 2 not in driver.got[1][:10], "there is something else to say"
    assert driver.got[1][10] == 2


def test_rules_that_contradict_a_grammar_are_named(driver: Driver) -> None:
    sampling = guided(allowed=pack_tokens([5, 6]))
    output = driver.run(new_request(0, PROMPT, [1, 2, 3], sampling=sampling), new_request(1, PROMPT, [4, 5, 6]))
    assert output.failed == [(0, CONTRADICTION)]


def test_logprobs_are_those_before_the_mask(driver: Driver) -> None:
    plain = msgspec.structs.replace(GREEDY, logprobs=2)
    free = driver.run(new_request(0, PROMPT, [1, 2, 3], sampling=plain))
    held = driver.run(new_request(1, PROMPT, [4, 5, 6], sampling=guided(plain)))
    assert free.logprobs is not None
    assert held.logprobs is not None
    assert free.logprobs[0] is not None
    assert held.logprobs[0] is not None
    assert free.logprobs[0].top == held.logprobs[0].top
    assert held.logprobs[0].rank > free.logprobs[0].rank
