"""Several continuations of one prompt, in a whole engine: beams equal transformers', samples do not depend on other
requests, forks do not change their parent, deadlines and priorities are kept. In float32."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tests.deadlines import scaled
from tests.e2e.reference import Reference, make_prompts, start, tokens_of
from vllm_lite import LLM, AsyncClient, BeamSearchParams, RequestOutput, SamplingParams
from vllm_lite.client.outputs import BeamSearchSequence
from vllm_lite.errors import RequestError
from vllm_lite.protocol.stats import Stats

BLOCK = 8
TIE = 1e-4
"""Beams may be in another order if their scores differ by less than this."""
TOKENIZERS_EOS = 2
"""The id of `</s>` in the tokenizer of tests.checkpoints."""
PROMPTS = make_prompts([1, 7, 8, 9, 40], seed=3)
NUM_BEAM_TOKENS = 10
DEADLINE_S = scaled(100.0)
GREEDY_LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(llama: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    address = f"ipc://{tmp_path_factory.mktemp('engine')}/s"
    with start(llama.path, block_size=BLOCK, address=address) as llm:
        yield llm


# ---- beams


def expected_beams(
    reference: Reference, prompt: list[int], params: SamplingParams
) -> tuple[list[list[int]], list[float]]:
    """Beams that transformers finds, best first, and their scores."""
    ids = torch.tensor([prompt])
    stops = list(params.stop_token_ids)
    found = reference.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=params.n,
        num_return_sequences=params.n,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        max_new_tokens=params.max_tokens,
        eos_token_id=stops or None,
        pad_token_id=0,  # it is in no prompt and no continuation here
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    rows = found.sequences[:, len(prompt) :].tolist()
    return [_without_padding(row, stops) for row in rows], found.sequences_scores.tolist()


def _without_padding(row: list[int], stops: list[int]) -> list[int]:
    end = next((at + 1 for at, token in enumerate(row) if token in stops), len(row))
    return row[:end]


def assert_beams(expected: tuple[list[list[int]], list[float]], output: RequestOutput, params: SamplingParams) -> None:
    sequences, scores = expected
    got = output.outputs
    assert [one.index for one in got] == list(range(params.n))
    penalty = params.length_penalty
    own_scores = [(one.cumulative_logprob or 0.0) / len(one.token_ids) ** penalty for one in got]
    assert own_scores == pytest.approx(scores, abs=TIE, rel=1e-5)
    for place, one in enumerate(got):
        if one.token_ids != sequences[place]:  # only where it changed places with one as good
            at = sequences.index(one.token_ids)
            assert abs(scores[at] - scores[place]) < TIE
        stopped = one.token_ids[-1] in params.stop_token_ids
        assert one.finish_reason == ("stop" if stopped else "length")


@pytest.fixture(scope="module")
def stop_tokens(llama: Reference) -> tuple[int, ...]:
    """Tokens that beams meet, so that hypotheses of many lengths compete."""
    params = SamplingParams(n=4, use_beam_search=True, max_tokens=NUM_BEAM_TOKENS)
    beams = [beam for prompt in PROMPTS for beam in expected_beams(llama, prompt, params)[0]]
    seen = [token for beam in beams for token in beam[2:]]
    return tuple(sorted(set(seen), key=lambda token: (-seen.count(token), token))[:8])


@pytest.fixture(scope="module")
def likely_tokens(llama: Reference) -> tuple[int, ...]:
    """The likeliest first tokens of the third prompt but one: if they end a beam, a search must look far for others."""
    first, second, _, *others = llama.logits(PROMPTS[2], [0])[0].topk(13).indices.tolist()
    return (first, second, *others)


Asked = list[tuple[list[int], SamplingParams]]


def searches(stop_tokens: tuple[int, ...], width: int, **options: Any) -> Asked:
    """Every prompt with every length penalty, and with no, few and many tokens that end a beam."""
    return [
        (prompt, SamplingParams(
            use_beam_search=True, n=width, max_tokens=NUM_BEAM_TOKENS, ignore_eos=True,
            stop_token_ids=stops, length_penalty=penalty, **options,
        ))
        for prompt in PROMPTS for penalty in (0.0, 1.0, 2.0) for stops in ((), stop_tokens[:2], stop_tokens)
    ]  # fmt: skip


def generate(llm: LLM, asked: Asked) -> list[RequestOutput]:
    return llm.generate([prompt for prompt, _ in asked], [params for _, params in asked], use_tqdm=False)


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("width", [2, 4])
def test_beams_match_transformers(
    llm: LLM,
    llama: Reference,
    stop_tokens: tuple[int, ...],
    likely_tokens: tuple[int, ...],
    width: int,
    early_stopping: bool,
) -> None:
    """All at once: searches share every step with others. Prompts fill, or just miss, their last block."""
    asked = searches(stop_tokens, width, early_stopping=early_stopping)
    asked += searches(likely_tokens, width, early_stopping=early_stopping)[20:27:3]
    outputs = generate(llm, asked)
    for (prompt, params), output in zip(asked, outputs, strict=True):
        assert_beams(expected_beams(llama, prompt, params), output, params)
    assert len({len(one.token_ids) for output in outputs for one in output.outputs}) >= 6, "they end early and late"
    stats = llm.stats()
    assert (stats.num_used_blocks, stats.copied_blocks > 0) == (0, True)


TINY = {"num_gpu_blocks_override": 20, "block_size": BLOCK}
"""19 blocks for prompts that have up to 6 with their output, and for all their samples or beams."""


@pytest.mark.parametrize(
    "settings",
    [
        {"preemption_mode": "recompute", "enable_prefix_caching": False, "async_scheduling": False},
        {"preemption_mode": "swap", "swap_space": 0.05},
    ],
    ids=["recompute", "swap"],
)
def test_a_tiny_pool_changes_nothing(
    llm: LLM, llama: Reference, stop_tokens: tuple[int, ...], settings: dict[str, Any]
) -> None:
    # The last one's beams need more blocks together than exist, and no beam can continue before all have reached the
    # same length.
    wide = SamplingParams(use_beam_search=True, n=8, max_tokens=22, ignore_eos=True)
    beams, samples = [*searches(stop_tokens, 4)[::2], (PROMPTS[-1], wide)], seeded(4)
    expected = tokens_of_samples(generate(llm, samples))
    with start(llama.path, **TINY, **settings) as tiny:
        found = generate(tiny, beams)
        together = generate(tiny, beams[-9:] + samples)
        stats = tiny.stats()
    for (prompt, params), output in zip(beams, found, strict=True):
        assert_beams(expected_beams(llama, prompt, params), output, params)
    assert tokens_of_samples(together[9:]) == expected
    assert tokens_of_samples(together[:9]) == tokens_of_samples(found[-9:])
    assert stats.preemptions > 0
    assert (stats.swaps > 0) == ("swap_space" in settings)
    assert (stats.num_used_blocks, stats.num_used_host_blocks) == (0, 0)


def test_the_models_own_end_tokens_end_a_beam(llama: Reference, stop_tokens: tuple[int, ...], tmp_path: Path) -> None:
    model = shutil.copytree(llama.path, tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((model / name).read_text()) | {"eos_token_id": list(stop_tokens[:3])}
        (model / name).write_text(json.dumps(settings))
    with start(model, block_size=BLOCK) as llm:
        found = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=3, max_tokens=12, length_penalty=0.5))
        asked = SamplingParams(use_beam_search=True, n=3, max_tokens=12, length_penalty=0.5)
        outputs = llm.generate(PROMPTS, asked, use_tqdm=False)
        ends = llm.engine.eos_token_ids
    assert set(ends) == {*stop_tokens[:3], TOKENIZERS_EOS}
    params = SamplingParams(n=3, max_tokens=12, length_penalty=0.5, stop_token_ids=ends)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert_beams(expected_beams(llama, prompt, params), output, params)
        assert all(one.stop_reason is None for one in output.outputs)
    assert {one.finish_reason for output in outputs for one in output.outputs} == {"stop", "length"}
    words = Tokenizer.from_file(str(model / "tokenizer.json"))
    for prompt, output, beams in zip(PROMPTS, outputs, found, strict=True):
        assert beams.prompt_token_ids == prompt
        for one, beam in zip(output.outputs, beams.sequences, strict=True):
            tokens, logprob = prompt + one.token_ids, one.cumulative_logprob
            text = words.decode(tokens, skip_special_tokens=False)
            assert beam.cum_logprob == pytest.approx(logprob, abs=TIE)
            assert beam == BeamSearchSequence(tokens, beam.cum_logprob, text, one.finish_reason, one.stop_reason)


# ---- samples


def seeded(n: int, **options: Any) -> Asked:
    params = SamplingParams(n=n, seed=11, max_tokens=12, ignore_eos=True, **options)
    return [(prompt, params) for prompt in PROMPTS]


def tokens_of_samples(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    return [[one.token_ids for one in output.outputs] for output in outputs]


def test_a_sample_is_the_same_whoever_else_is_drawn(llm: LLM) -> None:
    together = tokens_of_samples(generate(llm, seeded(4)))
    alone = [tokens_of_samples(generate(llm, [one]))[0] for one in seeded(4)]
    assert together == alone
    assert all(len({tuple(tokens) for tokens in samples}) == 4 for samples in alone), "samples differ"
    for n in (1, 2):
        assert tokens_of_samples(generate(llm, seeded(n))) == [samples[:n] for samples in alone]


def test_a_prompt_is_computed_once_for_all_its_samples(llama: Reference) -> None:
    prompt = PROMPTS[-1][:-1]  # 39 tokens: its last block is shared until it is written
    with start(llama.path, block_size=BLOCK, max_num_batched_tokens=16) as llm:
        params = SamplingParams(n=8, seed=1, max_tokens=9, ignore_eos=True)
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        stats = llm.stats()
    assert len({tuple(one.token_ids) for one in output.outputs}) == 8
    assert stats.prompt_tokens == len(prompt)
    assert stats.steps == 3 + 8  # chunks of 16 until the first token, and one step for each token after that
    assert stats.copied_blocks == 7  # one of the samples writes where the prompt ends
    assert stats.peak_used_blocks == 4 + 8 * 2  # all but the last block of the prompt are there once
    assert stats.generated_tokens == 8 * 9


def test_the_best_of_many_are_the_likeliest(llm: LLM) -> None:
    everything = generate(llm, seeded(6, logprobs=0))
    best = generate(llm, seeded(2, best_of=6))
    for output, all_samples in zip(best, everything, strict=True):
        ranked = sorted(all_samples.outputs, key=lambda one: -(one.cumulative_logprob or 0.0))
        assert [one.token_ids for one in output.outputs] == [one.token_ids for one in ranked[:2]]
        assert [one.index for one in output.outputs] == [0, 1]
        assert [one.logprobs for one in output.outputs] == [None, None]


# ---- forks


@asynccontextmanager
async def connected(llm: LLM) -> AsyncIterator[AsyncClient]:
    """For as long as a test may take."""
    async with asyncio.timeout(DEADLINE_S), AsyncClient(llm.config.address or "", timeout_s=DEADLINE_S) as client:
        yield client


async def last(stream: AsyncIterator[RequestOutput]) -> list[int]:
    output = [output async for output in stream][-1]
    assert output.finished
    return output.outputs[0].token_ids


async def wait_until(client: AsyncClient, condition: Callable[[Stats], bool]) -> None:
    while not condition(await client.stats()):  # noqa: ASYNC110  -- the engine sets no event
        await asyncio.sleep(0.002)


FORKED = 300  # tokens come several at a time: the parent must live until the forks arrive


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
async def test_forks_of_a_live_request(llm: LLM, prompt: list[int]) -> None:
    params = SamplingParams(seed=7, max_tokens=FORKED, ignore_eos=True)
    (unforked,) = tokens_of(llm.generate(prompt, params, use_tqdm=False))
    stats = llm.stats()

    async def body(client: AsyncClient) -> None:
        stream = client.generate(prompt, params, "parent")
        seen: list[int] = []
        forks: list[AsyncIterator[RequestOutput]] = []
        greedy = SamplingParams(temperature=0.0, max_tokens=FORKED, ignore_eos=True)
        async for output in stream:
            seen = output.outputs[0].token_ids
            if len(seen) >= 11 and not forks:
                have = len(seen)
                forks += await client.fork("parent", 1, greedy)
                forks += await client.fork("parent", 2)
        assert seen == unforked
        straight, *others = await asyncio.gather(*map(last, forks))
        for tokens in (straight, *others):
            assert tokens[:have] == unforked[:have]
            assert len(tokens) == FORKED
        assert len({tuple(tokens) for tokens in (unforked, straight, *others)}) == 4
        rest = SamplingParams(temperature=0.0, max_tokens=FORKED - have, ignore_eos=True)
        assert straight[have:] == await last(client.generate(prompt + unforked[:have], rest))

    for _ in range(5):  # on a busy machine the parent may end before its forks arrive: they compute it again
        async with connected(llm) as client:
            await body(client)
        if llm.stats().copied_blocks > stats.copied_blocks:
            break
    after = llm.stats()
    assert after.copied_blocks > stats.copied_blocks
    assert (after.num_running, after.num_waiting, after.num_used_blocks) == (0, 0, 0)


async def test_a_request_with_an_unread_end_can_be_forked(llm: LLM) -> None:
    async with connected(llm) as client:
        stream = client.generate(PROMPTS[2], SamplingParams(seed=7, max_tokens=30, ignore_eos=True), "parent")
        output = await anext(stream)
        seen = output.outputs[0].token_ids
        assert len(seen) < 30
        await wait_until(client, lambda stats: stats.num_running == 0)
        (fork,) = await client.fork("parent", 1, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
        tokens = await last(fork)
        rest = SamplingParams(temperature=0.0, max_tokens=20 - len(seen), ignore_eos=True)
        assert tokens == seen + await last(client.generate(PROMPTS[2] + seen, rest))
        assert (await last(stream))[: len(seen)] == seen


# ---- deadlines and priorities


async def test_a_deadline_ends_its_request_alone(llm: LLM) -> None:
    (expected,) = tokens_of(llm.generate(PROMPTS[3], GREEDY_LONG, use_tqdm=False))
    async with connected(llm) as client:
        hurried = SamplingParams(n=2, max_tokens=400, ignore_eos=True, deadline_ms=5)
        calm = asyncio.ensure_future(last(client.generate(PROMPTS[3], GREEDY_LONG)))
        with pytest.raises(RequestError, match="the deadline of 5 ms passed"):
            await last(client.generate(PROMPTS[4], hurried))
        assert await calm == expected
        in_time = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, deadline_ms=60_000)
        assert await last(client.generate(PROMPTS[3], in_time)) == expected
        assert (await client.stats()).num_used_blocks == 0


async def test_lower_priorities_are_served_first(llama: Reference, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/s"
    ended: list[str] = []

    async def one(client: AsyncClient, name: str, priority: int, max_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, priority=priority)
        await last(client.generate(PROMPTS[1], params, name))
        ended.append(name)

    async def ask(client: AsyncClient) -> None:
        first = asyncio.ensure_future(one(client, "first", 5, 200))
        await wait_until(client, lambda stats: stats.num_running == 1)
        others = [("late", 9), ("middle", 3), ("middle as well", 3), ("urgent", -2)]
        await asyncio.gather(first, *(one(client, name, priority, 5) for name, priority in others))

    with start(llama.path, max_num_seqs=1, scheduling_policy="priority", address=address) as llm:
        async with connected(llm) as client:
            await ask(client)
    assert ended == ["first", "urgent", "middle", "middle as well", "late"]
