"""Sources of masks, of grammars and of the thinking around them, compared with a plain replay of the tokens."""

import random
import time
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from tests.deadlines import scaled
from vllm_lite.config import demo_folder
from vllm_lite.errors import GrammarError, ModelError
from vllm_lite.protocol.params import Sampling, SamplingParams
from vllm_lite.protocol.structured import Thinking
from vllm_lite.structured.sources import matcher
from vllm_lite.structured.sources.grammars import Grammars
from vllm_lite.structured.sources.matcher import GrammarSource, compile_matcher
from vllm_lite.structured.sources.source import ALL_BITS, MaskSource
from vllm_lite.structured.sources.thinking import ThinkingSource
from vllm_lite.structured.sources.vocabulary import Vocabulary, load_vocabulary

FOLDER = Path(demo_folder())
WIDTH = 2100
"""Wider than the tokenizer's 2048 tokens."""
ENDS = (1, 0)
GRAMMAR = "%llguidance {}\nstart: /(ab|a[0-9]{1,3})+c?/\n"


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return load_vocabulary(FOLDER, WIDTH, ENDS)


@pytest.fixture(scope="module")
def token_of(vocabulary: Vocabulary) -> dict[str, int]:
    return {letter: vocabulary.tokenizer.tokenize_str(letter)[0] for letter in "abc0123xy<>"}


def allowed(source: MaskSource) -> set[int]:
    bitmask = np.full(-(-WIDTH // 32), ALL_BITS, np.uint32)
    source.fill_bitmask(bitmask)
    return set(np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little")).tolist())


def grammar_source(vocabulary: Vocabulary, grammar: str = GRAMMAR) -> GrammarSource:
    return GrammarSource(compile_matcher(grammar, vocabulary), vocabulary)


def test_a_grammar_ends_with_any_of_the_models_ends_and_nothing_follows_but_ends(
    vocabulary: Vocabulary, token_of: dict[str, int]
) -> None:
    source = grammar_source(vocabulary)
    assert not source.accept(1), "nothing is there yet"
    assert source.accept(token_of["a"])
    assert not source.accept(1)
    assert not allowed(source) & set(ENDS)
    assert source.accept(token_of["b"])
    assert allowed(source) >= set(ENDS)
    assert max(allowed(source)) < 2048, "what the tokenizer does not have is never allowed"
    assert source.num_valid([1, 0, 1, token_of["a"]]) == 3
    assert source.accept(0)
    assert allowed(source) == set(ENDS)
    assert source.forced_tokens() == []
    assert not source.accept(token_of["a"])
    assert source.accept(1)
    source.rollback(2)
    assert source.accept(token_of["c"])
    assert allowed(source) == set(ENDS), "the grammar takes no more"
    assert source.forced_tokens() == []
    source.rollback(3)
    assert source.forced_tokens() == [token_of["a"]]


@pytest.mark.parametrize(("cost_s", "is_refused"), [(0.03, True), (0.009, False)])
def test_a_grammar_that_is_too_slow_per_token_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
    vocabulary: Vocabulary,
    token_of: dict[str, int],
    cost_s: float,
    is_refused: bool,
) -> None:
    """Each mask and each token costs `cost_s` of a processor here."""
    source, clock = grammar_source(vocabulary), count(step=cost_s)
    monkeypatch.setattr(time, "thread_time", lambda: next(clock))

    def follow() -> None:
        for letter in "ab" * 10:
            allowed(source)
            assert source.accept(token_of[letter])

    if is_refused:
        with pytest.raises(GrammarError, match="takes too long to follow"):
            follow()
    else:
        follow()


def test_a_grammar_with_a_slow_first_mask_is_refused_when_compiled(
    monkeypatch: pytest.MonkeyPatch, vocabulary: Vocabulary
) -> None:
    clock = count(step=matcher.FREE_CPU_S + 0.01)
    monkeypatch.setattr(time, "thread_time", lambda: next(clock))
    with pytest.raises(GrammarError, match=r"^the grammar takes too long"):
        grammar_source(vocabulary)


THINKINGS = {
    "one mark each": Thinking(end=(900,), begin=(901,)),
    "longer marks": Thinking(end=(900, 900, 902), begin=(901, 903)),
    "a mark that the grammar may spell": Thinking(end=(900, 902), begin=(69, 900)),
    "open": Thinking(end=(900, 902), is_open=True),
    "open with a budget": Thinking(end=(900, 900, 902), is_open=True, budget=3),
    "no budget at all": Thinking(end=(900, 902), begin=(901,), budget=0),
    "never": Thinking(end=(900,)),
}


@pytest.mark.parametrize("with_grammar", [True, False], ids=["a grammar", "no grammar"])
@pytest.mark.parametrize("thinking", THINKINGS.values(), ids=THINKINGS.keys())
@pytest.mark.parametrize("seed", range(2))
def test_any_way_forth_and_back_is_the_same_as_a_replay(
    vocabulary: Vocabulary, token_of: dict[str, int], thinking: Thinking, with_grammar: bool, seed: int
) -> None:
    """Tokens are accepted and rolled back over every boundary; masks equal those of a new source with the same
    output."""

    def new() -> ThinkingSource:
        inner = grammar_source(vocabulary) if with_grammar else None
        return ThinkingSource(thinking, inner, vocabulary.eos_ids)

    rng = random.Random(seed)
    source, output = new(), list[int]()
    tokens = [*thinking.end, *thinking.begin, *token_of.values(), *ENDS, 900, 1500]
    for _ in range(60):
        may_follow = allowed(source)
        token = rng.choice([*tokens, *(token for token in tokens if token in may_follow)])
        if rng.random() < 0.25 and output:
            count = rng.randint(1, min(len(output), 8))
            source.rollback(count)
            del output[-count:]
        elif source.accept(token):
            assert token in may_follow
            output.append(token)
        else:
            assert token not in may_follow
        again = new()
        assert all(map(again.accept, output))
        assert allowed(source) == allowed(again)
        assert source.forced_tokens() == again.forced_tokens()
        forced = source.forced_tokens()
        assert source.num_valid(forced) == len(forced)
        assert allowed(source) == allowed(again), "num_valid and forced_tokens change nothing"


def test_the_grammar_begins_behind_the_end_of_thinking(vocabulary: Vocabulary, token_of: dict[str, int]) -> None:
    a, b = token_of["a"], token_of["b"]
    source = ThinkingSource(Thinking(end=(900, 902), begin=(901,)), grammar_source(vocabulary), vocabulary.eos_ids)
    assert allowed(source) == {a, 901} | (allowed(grammar_source(vocabulary)))
    assert source.num_valid([901, 5, 900, 1]) == 3, "no end while the grammar is to come"
    assert source.num_valid([901, 5, 900, 900, 902, a, b, 1, 5]) == 8
    assert source.num_valid([a, b, 901]) == 2, "it has not begun to think, so it does not think any more"


def test_the_end_of_thinking_is_found_behind_a_false_start_of_itself(vocabulary: Vocabulary) -> None:
    source = ThinkingSource(Thinking(end=(900, 900, 902), is_open=True, budget=3), None, vocabulary.eos_ids)
    assert source.num_valid([900, 900, 900, 902, 5]) == 5
    assert source.num_valid([900, 900, 900, 900]) == 3, "two of the mark are there, and the budget is spent"


def test_a_budget_forces_the_end_of_thinking(vocabulary: Vocabulary) -> None:
    source = ThinkingSource(Thinking(end=(900, 902), is_open=True, budget=2), None, vocabulary.eos_ids)
    assert source.accept(5)
    assert source.forced_tokens() == []
    assert source.accept(900)
    assert source.forced_tokens() == [902], "a part of the mark is there"
    assert allowed(source) == {902}
    source.rollback(1)
    assert source.accept(6)
    assert source.forced_tokens() == [900, 902]
    assert allowed(source) == {900}
    assert source.num_valid([900, 902, 5, 1]) == 4


def sampling(**params: Any) -> Sampling:
    return SamplingParams(**params).for_worker(0, 0, (), None, unscored=False)


def result(future: object) -> MaskSource:
    assert isinstance(future, Future)
    found: MaskSource = future.result(scaled(20))
    return found


def test_equal_grammars_are_compiled_once_and_each_sequence_has_its_own(
    vocabulary: Vocabulary, token_of: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []

    def counted(grammar: str, vocabulary: Vocabulary) -> Any:
        compiled.append(grammar)
        return compile_matcher(grammar, vocabulary)

    monkeypatch.setattr("vllm_lite.structured.sources.grammars.compile_matcher", counted)
    may_load = Event()

    def load() -> Vocabulary:
        may_load.wait(scaled(20))
        return vocabulary

    grammars = Grammars(load)
    first, second = (grammars.source_of(sampling(grammar=GRAMMAR)) for _ in range(2))
    forgotten = grammars.source_of(sampling(grammar="%llguidance {}\nstart: /forgotten/\n"))
    other = grammars.source_of(sampling(grammar="%llguidance {}\nstart: /other/\n"))
    assert isinstance(first, Future)
    assert not first.done()
    del forgotten
    may_load.set()
    one, two = result(first), result(second)
    result(other)
    assert one.accept(token_of["a"])
    assert two.forced_tokens() == [token_of["a"]], "the other sequence has not begun"
    third = grammars.source_of(sampling(grammar=GRAMMAR))
    assert isinstance(third, Future)
    assert third.done(), "it is in the cache"
    assert [name for name in ("ab", "forgotten", "other") if any(name in text for text in compiled)] == ["ab", "other"]
    assert len(compiled) == 2
    grammars.close()


def test_grammars_that_cannot_be_compiled_fail_with_a_sentence(vocabulary: Vocabulary, tmp_path: Path) -> None:
    grammars = Grammars(lambda: vocabulary)
    wrong = grammars.source_of(sampling(grammar="nonsense"))
    with pytest.raises(GrammarError, match=r"the grammar cannot be followed: .*Expected token"):
        result(wrong)
    grammars = Grammars(lambda: load_vocabulary(tmp_path, WIDTH, ENDS))
    with pytest.raises(ModelError, match="grammars need the model's tokenizer, and there is no"):
        result(grammars.source_of(sampling(grammar=GRAMMAR)))
    assert grammars.source_of(sampling()) is None
    thinks = grammars.source_of(sampling(thinking=Thinking(end=(5,), is_open=True, budget=0)))
    assert isinstance(thinks, ThinkingSource)
    assert allowed(thinks) == {5}
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be used for grammars"):
        load_vocabulary(tmp_path, WIDTH, ENDS)
    with pytest.raises(ModelError, match="names no token that ends"):
        load_vocabulary(FOLDER, WIDTH, ())
