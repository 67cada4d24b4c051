"""Logprobs of prompts in the engine: the permitted use of the cache, and the assignment of scores to requests."""

from typing import Any

import pytest

from tests.scheduler_rig import Rig, expected
from tests.unit.test_core import EOS, VOCAB, make_core
from vllm_lite.engine.request import Request
from vllm_lite.engine.scheduling.handles import Handles
from vllm_lite.errors import RequestError
from vllm_lite.protocol.api import ForkRequest, Generate, PromptLogprobs, TokenLogprobs
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.step import ModelOutput

PROMPT = list(range(1, 17))


def history(rig: Rig, request: Request) -> Any:
    return rig.worker.sequences[request.sequences[0].handle]


def test_a_prompt_that_is_scored_is_computed_from_its_beginning() -> None:
    rig = Rig()
    rig.add("first", PROMPT, 3)
    rig.drain()
    written = rig.worker.num_written
    scored = rig.add("scored", PROMPT, 3, prompt_logprobs=1)
    rig.step()
    assert (rig.worker.num_written - written, scored.num_cached_at_start) == (16, 0)
    rig.drain()
    again = rig.add("again", PROMPT, 3)
    rig.step()
    assert again.num_cached_at_start == 15
    rig.drain()
    assert rig.output("scored") == rig.output("again") == expected(PROMPT, 3)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_scored_prompt_that_is_preempted_in_its_prompt_begins_again_whatever_is_cached(depth: int) -> None:
    """The older one grows into a fifth block while the scored one has computed a part of its four."""
    rig = Rig(num_blocks=10, depth=depth, max_num_batched_tokens=4)
    older = rig.add("older", PROMPT, 20)
    while not older.sequences[0].num_output and not older.sequences[0].num_pending:
        rig.step()
    scored = rig.add("scored", PROMPT, 3, prompt_logprobs=1)
    sequence = scored.sequences[0]
    while not rig.scheduler.counters.preemptions:
        rig.step()
        assert "older" in rig.scheduler.requests
    assert sequence.unscored
    computed = []
    while rig.scheduler.requests:
        if "scored" in rig.scheduler.requests and sequence.num_computed:
            computed.append(sequence.num_computed)
        rig.step()
    assert computed[0] < 15
    assert rig.output("scored") == expected(PROMPT, 3)


def test_a_scored_prompt_that_is_preempted_behind_its_prompt_may_use_the_cache() -> None:
    rig = Rig(num_blocks=10)
    older = rig.add("older", list(range(20, 36)), 20)
    scored = rig.add("scored", PROMPT, 20, prompt_logprobs=1)
    while not rig.scheduler.counters.preemptions:
        rig.step()
    assert older.sequences[0].num_output
    assert not scored.sequences[0].unscored
    rig.drain()
    assert rig.output("scored") == expected(PROMPT, 20)


def test_only_the_first_sample_is_scored() -> None:
    rig = Rig()
    request = rig.add("a", PROMPT, 5, n=3, prompt_logprobs=2)
    rig.step()
    assert [sequence.sampling().prompt_logprobs for sequence in request.sequences] == [2, None, None]
    rig.drain()


def scores(start: int) -> PromptLogprobs:
    return PromptLogprobs(start, [TokenLogprobs(-1.0, 1, ())])


def test_scores_go_to_the_sequence_that_had_the_handle_when_they_were_made() -> None:
    rig = Rig()
    first, second, plain = (
        rig.add(name, [1, 2], 3, prompt_logprobs=number) for name, number in (("a", 1), ("b", 1), ("c", None))
    )
    known = Handles()
    for request, step in ((first, 3), (plain, 4)):
        known.introduce(request.sequences[0], step)
    (produced,) = known.scores(ModelOutput(0, 3, b"", prompts=[(0, scores(1)), (1, scores(1)), (8, scores(1))]))
    assert (produced.request, produced.prompt, produced.token_ids) == (first, scores(1), [])
    known.give_back(first.sequences[0])
    known.introduce(second.sequences[0], 6)
    assert second.sequences[0].handle == first.sequences[0].handle
    assert known.scores(ModelOutput(0, 5, b"", prompts=[(0, scores(1))])) == [], "a step that was sent for the first"
    (produced,) = known.scores(ModelOutput(0, 6, b"", prompts=[(0, scores(1))]))
    assert produced.request is second


# ---- refusals


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias must be between 0 and {VOCAB - 1}, got {VOCAB}"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias must be between 0 and"),
        ({"allowed_token_ids": [1, VOCAB]}, "allowed_token_ids must be between 0 and"),
        ({"bad_words_token_ids": [[1], [2, VOCAB + 5]]}, "bad_words_token_ids must be between 0 and"),
        ({"stop_token_ids": [2**40]}, "stop_token_ids must be between 0 and"),
        ({"extra_args": {"mine": 1}}, "extra_args are the client's own; the engine takes none"),
        ({"bad_words": ["no"]}, "bad_words must come to the engine as bad_words_token_ids"),
    ],
)
def test_params_that_workers_cannot_serve_are_refused(fields: dict[str, Any], message: str) -> None:
    core = make_core()
    with pytest.raises(RequestError, match=message):
        core.add(b"client", Generate("a", pack_tokens([1, 2]), SamplingParams(**fields)))
    assert not core.scheduler.requests


def test_more_prompt_logprobs_than_a_message_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_lite.engine.intake.MAX_PROMPT_SCORES", 8)
    core = make_core()
    params = SamplingParams(prompt_logprobs=3)
    core.add(b"client", Generate("a", pack_tokens([1, 2]), params))
    with pytest.raises(RequestError, match="prompt_logprobs of 3 for 3 prompt tokens are more than 8 numbers"):
        core.add(b"client", Generate("b", pack_tokens([1, 2, 3]), params))


def test_each_score_is_sent_once() -> None:
    """However often a prompt is computed, and whichever scores its client has already."""
    rig = Rig()
    request = rig.add("a", [1, 2, 3, 4], 3, prompt_logprobs=0)
    request.num_scored = 2  # it was sent again by a client that has the first two
    known = Handles()
    known.introduce(request.sequences[0], 1)
    one = scores(1).entries[0]

    def sent(start: int, count: int) -> list[PromptLogprobs | None]:
        result = ModelOutput(0, 3, b"", prompts=[(0, PromptLogprobs(start, [one] * count))])
        return [item.prompt for item in known.scores(result)]

    assert sent(1, 2) == [PromptLogprobs(2, [one])]
    assert sent(1, 2) == []
    assert sent(3, 1) == [PromptLogprobs(3, [one])]
    assert request.num_scored == 4


def test_a_prompt_with_known_scores_is_taken_from_the_cache() -> None:
    core = make_core()
    prompt = pack_tokens(PROMPT)
    for name, num_scored in (("part", 15), ("all", 16)):
        params = SamplingParams(prompt_logprobs=0)
        request = core.add(b"client", Generate(name, prompt, params, num_scored=num_scored)).request
        assert request.sequences[0].unscored is (name == "part")
    with pytest.raises(RequestError, match="num_scored must be at most the prompt's 16 tokens, got 17"):
        core.add(b"client", Generate("b", prompt, SamplingParams(prompt_logprobs=0), num_scored=17))


def test_no_fork_asks_for_the_scores_of_its_prompt() -> None:
    core = make_core()
    message = Generate("a", pack_tokens([1, 2]), SamplingParams(prompt_logprobs=0, stop_token_ids=[EOS]))
    core.add(b"client", message)
    with pytest.raises(RequestError, match="a fork does not compute its prompt"):
        core.fork(b"client", ForkRequest("a", "b", 0, message.params))
