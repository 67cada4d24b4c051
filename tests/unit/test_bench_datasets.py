"""The requests of `bench serve`: as many, as long and as equal as asked for, and the same for the same seed."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.config import demo_folder
from vllm_lite.errors import ConfigError
from vllm_lite.tools.bench.serve import arrivals
from vllm_lite.tools.bench.serve_datasets import DatasetOptions, RandomPrompts, make_requests

DEMO = Path(demo_folder())


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return Tokenizer.load(DEMO)


def test_random_ids_have_the_lengths_asked_for() -> None:
    options = DatasetOptions(num_prompts=50, random_input_len=40, random_output_len=20, random_prefix_len=8)
    requests = make_requests(options, None)
    assert len(requests) == 50
    assert {(len(one.prompt), one.input_len, one.output_len) for one in requests} == {(48, 48, 20)}
    assert len({tuple(one.prompt[:8]) for one in requests}) == 1
    assert len({tuple(one.prompt[8:]) for one in requests}) == 50


def test_lengths_vary_within_the_range() -> None:
    options = DatasetOptions(num_prompts=400, random_input_len=40, random_output_len=20, random_range_ratio=0.25)
    requests = make_requests(options, None)
    assert {one.input_len for one in requests} == set(range(30, 51))
    assert {one.output_len for one in requests} == set(range(15, 26))


def test_random_texts_have_the_given_number_of_tokens(words: Tokenizer) -> None:
    options = DatasetOptions(num_prompts=40, random_input_len=64, random_prefix_len=16)
    requests = make_requests(options, words)
    for request in requests:
        assert isinstance(request.prompt, str)
        assert len(words.encode(request.prompt, add_special_tokens=False)) == request.input_len
    assert {request.input_len for request in requests} == {80}
    assert len({request.prompt[:16] for request in requests}) == 1


def test_random_tokens_are_plain(words: Tokenizer) -> None:
    ids = set(RandomPrompts(random.Random(0), words).ids(50_000))
    assert len(words.special_ids) > 0
    assert not ids & words.special_ids
    assert max(ids) == words.vocab_size - 1


def test_the_seed_decides(words: Tokenizer) -> None:
    for name in ("random", "prefix_repetition"):
        for tokenizer in (None, words):
            one, same, other = (
                make_requests(DatasetOptions(dataset_name=name, num_prompts=20, seed=seed), tokenizer)
                for seed in (7, 7, 8)
            )
            assert one == same
            assert all(mine.prompt != theirs.prompt for mine, theirs in zip(one, other, strict=True))


def test_prefixes_are_repeated_in_a_mixed_order() -> None:
    options = DatasetOptions(
        dataset_name="prefix_repetition",
        num_prompts=30,
        prefix_repetition_prefix_len=20,
        prefix_repetition_suffix_len=5,
        prefix_repetition_num_prefixes=3,
        prefix_repetition_output_len=9,
    )
    requests = make_requests(options, None)
    prefixes = [tuple(request.prompt[:20]) for request in requests]
    assert sorted(Counter(prefixes).values()) == [10, 10, 10]
    assert any(prefixes[place] == prefixes[place + 1] for place in range(29))
    assert len({tuple(request.prompt[20:]) for request in requests}) == 30
    assert {(request.input_len, request.output_len) for request in requests} == {(25, 9)}


def talk(*values: str) -> dict[str, list[dict[str, str]]]:
    return {"conversations": [{"from": "human", "value": value} for value in values]}


def test_sharegpt(tmp_path: Path, words: Tokenizer) -> None:
    question, answer = "Once upon a time there was a cat.", "It was a patient cat, and it had a drum."
    file = tmp_path / "talks.json"
    talks = [talk("alone"), talk("", answer), talk(question, ""), talk(question, answer), talk(question * 300, answer)]
    file.write_text(json.dumps(talks))
    options = DatasetOptions(dataset_name="sharegpt", dataset_path=str(file))
    (request,) = make_requests(options, words)
    assert request.prompt == question
    assert request.input_len == len(words.encode(question, add_special_tokens=False))
    assert request.output_len == len(words.encode(answer, add_special_tokens=False))
    given = DatasetOptions(dataset_name="sharegpt", dataset_path=str(file), sharegpt_output_len=7)
    assert [one.output_len for one in make_requests(given, words)] == [7, 7]
    assert (
        len(make_requests(given, None)) == 4
    )  # without a tokenizer no conversation is too long, so only the one without an answer is left out


def test_custom(tmp_path: Path, words: Tokenizer) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "One windy day"}\n{"prompt": [5, 6, 7], "output_tokens": 3, "more": 1}\n')
    requests = make_requests(DatasetOptions(dataset_name="custom", dataset_path=str(file), custom_output_len=11), words)
    assert [request.prompt for request in requests] == ["One windy day", [5, 6, 7]]
    assert [request.output_len for request in requests] == [11, 3]
    assert requests[1].input_len == 3
    assert requests[0].input_len == len(words.encode("One windy day", add_special_tokens=False))
    one = DatasetOptions(dataset_name="custom", dataset_path=str(file), num_prompts=1)
    assert len(make_requests(one, None)) == 1


@pytest.mark.parametrize(
    ("content", "name", "text"),
    [
        ("[", "sharegpt", "cannot be read"),
        ("[]", "sharegpt", "no request"),
        ('{"text": 1}', "custom", "prompt"),
        (None, "custom", "No such file"),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path: Path, words: Tokenizer, content: str, name: str, text: str) -> None:
    file = tmp_path / "data"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=text):
        make_requests(DatasetOptions(dataset_name=name, dataset_path=str(file)), words)


def test_datasets_that_cannot_be_made() -> None:
    with pytest.raises(ConfigError, match="--dataset-path"):
        make_requests(DatasetOptions(dataset_name="sharegpt"), None)
    with pytest.raises(ConfigError, match="10 prefixes"):
        make_requests(DatasetOptions(dataset_name="prefix_repetition", num_prompts=3), None)


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 50.0])
def test_arrivals(burstiness: float) -> None:
    times_s = arrivals(2000, 20.0, burstiness, seed=3)
    assert times_s == sorted(times_s)
    assert times_s == arrivals(2000, 20.0, burstiness, seed=3)
    assert times_s[-1] == pytest.approx(100.0)
    gaps = [later - earlier for earlier, later in zip([0.0, *times_s], times_s, strict=False)]
    variance = sum((20 * gap - 1) ** 2 for gap in gaps) / len(gaps)  # of a gamma process: 1 / burstiness
    assert variance == pytest.approx(1 / burstiness, rel=0.25)


def test_all_at_once() -> None:
    assert arrivals(3, float("inf"), 1.0, seed=0) == [0.0, 0.0, 0.0]
