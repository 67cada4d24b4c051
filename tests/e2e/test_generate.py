"""Promises of LLM.generate beside the tokens: order, reasons to end, stops, limits, prompts of every form."""

import json
import shutil
from typing import Any

import pytest

from tests.e2e.reference import GREEDY, NUM_TOKENS, Reference, make_prompts, start, tokens_of
from tests.unit.test_time_slice import own_slice_ns
from vllm_lite import LLM, RequestOutput, SamplingParams
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.errors import RequestError
from vllm_lite.transport.time_slice import short_slices

BLOCK_SIZE = 16
TEXT = "The quick brown fox reads a page"


@pytest.fixture(scope="module")
def llm(llama):
    with start(llama.path, block_size=BLOCK_SIZE, single_process=False) as llm:
        yield llm


def run(llm: LLM, prompt: Any, **params: Any) -> RequestOutput:
    """Run one greedy request, which end tokens do not end unless `params` say otherwise."""
    settings = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True} | params
    (output,) = llm.generate(prompt, SamplingParams(**settings), use_tqdm=False)
    return output


# ---- order, ends


def test_results_are_in_the_order_of_the_prompts_not_of_their_ends(llm, llama):
    cases = llama.cases[::-1][:12]
    lengths = [25, 3, 14, 30, 1, 9, 32, 2, 20, 6, 11, 17]
    params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=length) for length in lengths]
    outputs = llm.generate([case.prompt for case in cases], params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [case.prompt for case in cases]
    assert tokens_of(outputs) == [case.tokens[:length] for case, length in zip(cases, lengths, strict=True)]
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    assert all(output.finished for output in outputs)
    ends = [output.metrics.last_token_time for output in outputs]
    assert sorted(range(12), key=lambda i: ends[i]) != list(range(12)), "they did end in another order"
    assert len({output.request_id for output in outputs}) == 12


def test_the_caller_waits_with_a_short_time_slice(llm, llama, monkeypatch):
    """Else it would wait for threads that compute the next tokens, on a kernel that has slices of a thread's own."""
    before_ns, seen, collect = own_slice_ns(), set(), LLM._collect
    with short_slices():
        short_ns = own_slice_ns()

    def seeing(*args: Any) -> None:
        seen.add(own_slice_ns())
        collect(*args)

    monkeypatch.setattr(LLM, "_collect", seeing)
    run(llm, llama.cases[0].prompt)
    assert seen == {short_ns}
    assert own_slice_ns() == before_ns


def test_greedy_and_random_requests_side_by_side(llm, llama):
    """A list of parameters has one for each prompt, and each prompt gets the same output as alone."""
    cases = llama.cases[5:11]
    params = [
        GREEDY,
        SamplingParams(seed=1, max_tokens=8, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=2),
        SamplingParams(seed=1, top_k=5, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0.5, seed=9, top_p=0.5, max_tokens=12, ignore_eos=True, logprobs=0),
        GREEDY,
    ]
    prompts = [case.prompt for case in cases]
    together = llm.generate(prompts, params, use_tqdm=False)
    alone = [llm.generate(prompt, one, use_tqdm=False)[0] for prompt, one in zip(prompts, params, strict=True)]
    assert tokens_of(together) == tokens_of(alone)
    assert [len(tokens) for tokens in tokens_of(together)] == [one.max_tokens for one in params]
    assert tokens_of(together)[0] == cases[0].tokens
    assert tokens_of(together)[2] == cases[2].tokens[:3]


def test_everyone_gets_the_logprobs_they_asked_for(llm, llama):
    wanted = [None, 0, 1, 7]
    params = [SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=count) for count in wanted]
    outputs = llm.generate([case.prompt for case in llama.cases[:4]], params, use_tqdm=False)
    none, *some = (output.outputs[0] for output in outputs)
    assert none.logprobs is None
    assert none.cumulative_logprob is None
    assert [[len(entry) for entry in completion.logprobs] for completion in some] == [[1] * 4, [1] * 4, [7] * 4]
    assert all(next(iter(entry.values())).rank == 1 for completion in some for entry in completion.logprobs)


def test_without_max_tokens_the_context_is_the_limit(llm, llama):
    prompt = llama.cases[-1].prompt
    output = run(llm, prompt, max_tokens=None)
    assert output.outputs[0].finish_reason == "length"
    assert len(prompt) + len(output.outputs[0].token_ids) == llm.engine.max_model_len == 512


# ---- end tokens


@pytest.fixture(scope="module")
def ending(llama, tmp_path_factory) -> Reference:
    """The same weights with two end tokens that come up in the greedy continuation of case 9, besides the usual one."""
    path = tmp_path_factory.mktemp("ending") / "llama"
    shutil.copytree(llama.path, path)
    tokens = llama.cases[9].tokens
    first, second = (next(i for i in range(at, NUM_TOKENS) if tokens[i] not in tokens[:i]) for at in (6, 12))
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((path / name).read_text())
        settings["eos_token_id"] = [tokens[second], tokens[first]]
        (path / name).write_text(json.dumps(settings))
    return Reference(path)


@pytest.fixture(scope="module")
def ending_llm(ending):
    with start(ending.path) as llm:
        yield llm


def test_an_end_token_ends_the_request(ending, ending_llm, llama):
    case = llama.cases[9]
    eos = set(ending_llm.engine.eos_token_ids)
    assert len(eos) == 3
    at = next(i for i, token in enumerate(case.tokens) if token in eos)
    completion = run(ending_llm, case.prompt, ignore_eos=False).outputs[0]
    assert completion.token_ids == case.tokens[: at + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    tokenizer = Tokenizer.load(ending.path)
    assert completion.text == tokenizer.decode(case.tokens[:at], skip_special_tokens=True)
    shown = run(ending_llm, case.prompt, ignore_eos=False, include_stop_str_in_output=True).outputs[0]
    assert shown.text == tokenizer.decode(case.tokens[: at + 1], skip_special_tokens=True)


def test_ignore_eos(ending_llm, llama):
    case = llama.cases[9]
    completion = run(ending_llm, case.prompt).outputs[0]
    assert completion.token_ids == case.tokens
    assert completion.finish_reason == "length"


@pytest.mark.parametrize("min_tokens", [1, 7, 14, 20])
def test_min_tokens(ending, ending_llm, llama, min_tokens):
    """Until then no end token is sampled; the most likely other token is taken, as in transformers."""
    case = llama.cases[9]
    expected = ending.generate(
        case.prompt, eos_token_id=list(ending_llm.engine.eos_token_ids), min_new_tokens=min_tokens
    )
    completion = run(ending_llm, case.prompt, ignore_eos=False, min_tokens=min_tokens).outputs[0]
    assert completion.token_ids == expected.tokens
    assert len(completion.token_ids) >= min_tokens


def test_stop_token_ids(llm, llama):
    case = llama.cases[12]
    stop = case.tokens[10]
    at = case.tokens.index(stop)
    completion = run(llm, case.prompt, stop_token_ids=[stop, 383 if stop != 383 else 382]).outputs[0]
    assert completion.token_ids == case.tokens[: at + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


# ---- stop strings: the client finds them, and has to tell the engine


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(llm, llama, include):
    case = llama.cases[14]
    whole = Tokenizer.load(llama.path).decode(case.tokens, skip_special_tokens=True)
    stop = whole[20:24]
    at = whole.index(stop)
    output = run(llm, case.prompt, max_tokens=400, stop=["never to be seen", stop], include_stop_str_in_output=include)
    completion = output.outputs[0]
    assert completion.text == whole[: at + len(stop) * include]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert len(completion.token_ids) < NUM_TOKENS
    assert completion.token_ids == case.tokens[: len(completion.token_ids)]
    stats = llm.stats()  # sent after the abort, on the same connection
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)


def test_a_stop_string_ends_one_request_of_many(llm, llama):
    cases = llama.cases[10:18]
    whole = Tokenizer.load(llama.path).decode(cases[3].tokens, skip_special_tokens=True)
    params = [GREEDY] * 8
    params[3] = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, stop=(whole[10:13],))
    outputs = llm.generate([case.prompt for case in cases], params, use_tqdm=False)
    assert outputs[3].outputs[0].finish_reason == "stop"
    others = [i for i in range(8) if i != 3]
    assert [outputs[i].outputs[0].token_ids for i in others] == [cases[i].tokens for i in others]


# ---- the prefix cache, as its user sees it


@pytest.mark.parametrize("length", [BLOCK_SIZE - 1, BLOCK_SIZE, 3 * BLOCK_SIZE, 3 * BLOCK_SIZE + 2])
def test_a_repeated_prompt_is_cached(llm, length):
    """All full blocks are cached, except for the last token, whose logits are needed."""
    (prompt,) = make_prompts([length], seed=1000 + length)
    first, second = run(llm, prompt), run(llm, prompt)
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == min(length // BLOCK_SIZE * BLOCK_SIZE, length - 1)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_common_prefixes_and_generated_tokens_are_cached(llm, llama):
    (stem,) = make_prompts([40], seed=2000)
    first = run(llm, stem)
    other = run(llm, [*stem[:37], 5, 6, 7])
    assert other.num_cached_tokens == 2 * BLOCK_SIZE
    longer = stem + first.outputs[0].token_ids
    continued = run(llm, longer)
    assert continued.num_cached_tokens == (len(longer) - 1) // BLOCK_SIZE * BLOCK_SIZE
    for prompt, output in (([*stem[:37], 5, 6, 7], other), (longer, continued)):
        assert output.outputs[0].token_ids == llama.generate(prompt).tokens


def test_a_block_is_cached_behind_its_own_beginning_only(llm, llama):
    """Equal tokens after other tokens have different KV."""
    one, two, three, four = (make_prompts([BLOCK_SIZE], seed=seed)[0] for seed in range(3000, 3004))
    for prompt in (one + two, three + four):
        run(llm, prompt)
    output = run(llm, one + four)
    assert output.num_cached_tokens == BLOCK_SIZE
    assert output.outputs[0].token_ids == llama.generate(one + four).tokens


def test_without_the_cache_nothing_is_cached(llama):
    prompt = llama.cases[-3].prompt
    with start(llama.path, enable_prefix_caching=False) as llm:
        assert [run(llm, prompt).num_cached_tokens for _ in range(2)] == [0, 0]


# ---- prompts and text


def test_prompts_of_every_form(llm, llama):
    ids = Tokenizer.load(llama.path).encode(TEXT)
    forms: list[Any] = [TEXT, {"prompt": TEXT}, ids, {"prompt_token_ids": ids}]
    outputs = llm.generate(forms, GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [ids] * 4
    assert [output.prompt for output in outputs] == [TEXT, TEXT, None, None]
    expected = llama.generate(ids).tokens
    assert tokens_of(outputs) == [expected] * 4
    for one in (TEXT, ids, {"prompt_token_ids": tuple(ids)}):
        assert tokens_of(llm.generate(one, GREEDY, use_tqdm=False)) == [expected]


def test_text_is_the_tokenizers_decoding_of_the_tokens(llm, llama):
    tokenizer = Tokenizer.load(llama.path)
    cases = llama.cases
    outputs = llm.generate([case.prompt for case in cases], GREEDY, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    assert texts == [tokenizer.decode(case.tokens, skip_special_tokens=True) for case in cases]
    assert any("\N{REPLACEMENT CHARACTER}" in text for text in texts), "some end within a character"
    assert run(llm, cases[0].prompt, detokenize=False).outputs[0].text == ""


def test_a_prompt_that_is_too_long_is_refused_and_nothing_else_notices(llm, llama):
    with pytest.raises(RequestError, match=r"prompt 1: .*512 tokens.*513 input"):
        llm.generate([llama.cases[3].prompt, [5] * 513], GREEDY, use_tqdm=False)
    cut = run(llm, [5] * 500, max_tokens=400, ignore_eos=True).outputs[0]
    assert (len(cut.token_ids), cut.finish_reason) == (12, "length")
    assert run(llm, llama.cases[3].prompt).outputs[0].token_ids == llama.cases[3].tokens
    assert llm.stats().num_running == 0


def test_two_engines_at_a_time_do_not_disturb_each_other(llm, ending_llm, llama):
    case = llama.cases[9]
    assert llm.engine.epoch != ending_llm.engine.epoch
    assert run(llm, case.prompt).outputs[0].token_ids == run(ending_llm, case.prompt).outputs[0].token_ids
