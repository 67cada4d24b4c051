"""Requests of chaos.py, and their expected answers: request specs, and their tokens from an engine in which nobody
died.

Everything is float32. A spec whose best two logits come closer than MARGIN anywhere, or whose tokens change with the
company it is computed in, is left out: of such a request no engine promises the same tokens twice.
"""

import asyncio
import os
import random
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from vllm_lite import AsyncClient, EngineConfig, RequestOutput, SamplingParams
from vllm_lite.client.engines.launch import LaunchedEngine, launch
from vllm_lite.client.engines.session import Session
from vllm_lite.client.streams.stream import Event, StreamFailure
from vllm_lite.protocol.api import Generate, Tokens
from vllm_lite.protocol.codec import pack_tokens

MARGIN = 1e-3
REFERENCE_S = 120.0
"""Maximum seconds for all references together."""
LONGEST_PROMPT, STEM = 90, 48
FIRST_TOKEN = 3
"""First token id that is not special."""

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "ending": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "top_p": 0.95, "ignore_eos": True},
    "penalised": {"temperature": 0.7, "top_k": 30, "repetition_penalty": 1.2, "ignore_eos": True},
    "several": {"temperature": 0.9, "n": 4, "ignore_eos": True},
    "beams": {"temperature": 0.0, "n": 3, "use_beam_search": True, "ignore_eos": True},
    "stopped": {"temperature": 0.0, "stop": ["e", "q", "the"], "min_tokens": 12},
    "logprobs": {"temperature": 0.0, "logprobs": 2, "ignore_eos": True},
    "scored": {"temperature": 0.0, "prompt_logprobs": 1, "ignore_eos": True},
}
"""Sampling parameters of each kind of request, beside seed and length."""
SHORT = ("beams", "stopped")
"""Kinds with few tokens: each beam takes a row, and a stop string ends its request early anyway."""


class Spec(msgspec.Struct, frozen=True):
    """One request; `key` names it."""

    key: str
    kind: str
    prompt: list[int]
    params: dict[str, Any]

    def sampling(self, **changes: Any) -> SamplingParams:
        return SamplingParams(**(self.params | changes))


class Fork(msgspec.Struct, frozen=True):
    """A branch of a request after its first `have` tokens, with its own draws and length."""

    parent: str
    have: int
    seed: int
    max_tokens: int

    @property
    def params(self) -> dict[str, Any]:
        return {"temperature": 0.9, "seed": self.seed, "max_tokens": self.max_tokens, "ignore_eos": True}


class Answer(msgspec.Struct):
    """Answer to a request: tokens and finish reason of each sample, and logprobs if it asked for them."""

    tokens: list[list[int]]
    reasons: list[str | None]
    logprobs: list[list[float]] | None = None
    prompt_logprobs: list[float] | None = None

    @classmethod
    def of(cls, output: RequestOutput) -> "Answer":
        samples = sorted(output.outputs, key=lambda sample: sample.index)
        scores = output.prompt_logprobs
        logprobs = [
            [next(iter(entry.values())).logprob for entry in sample.logprobs]
            for sample in samples
            if sample.logprobs is not None
        ]
        return cls(
            [list(sample.token_ids) for sample in samples],
            [sample.finish_reason for sample in samples],
            logprobs or None,
            None if scores is None else [next(iter(entry.values())).logprob for entry in scores if entry],
        )


def make_specs(seed: int, vocab_size: int, per_kind: int, longest: int) -> list[Spec]:
    """`per_kind` requests of every kind, of at most `longest` tokens; every second prompt begins like the others."""
    rng = random.Random(seed)
    stem = [rng.randrange(FIRST_TOKEN, vocab_size) for _ in range(STEM)]
    specs = []
    for kind, params in KINDS.items():
        for number in range(per_kind):
            length = rng.randint(1, LONGEST_PROMPT)
            prompt = [rng.randrange(FIRST_TOKEN, vocab_size) for _ in range(length)]
            if number % 2:
                prompt = (stem + prompt)[: max(length, 8)]
            max_tokens = rng.randint(16, 32) if kind in SHORT else rng.randint(longest // 4, longest)
            fields = params | {"max_tokens": max_tokens}
            if params["temperature"] > 0:
                fields["seed"] = rng.randrange(2**40)
            specs.append(Spec(f"{kind}-{number}", kind, prompt, fields))
    return specs


@contextmanager
def quiet_engine(settings: dict[str, Any]) -> Iterator[LaunchedEngine]:
    """An engine without faults."""
    launched = launch(EngineConfig.check(settings))
    try:
        yield launched
    finally:
        launched.close()


async def answers(address: str, specs: Sequence[Spec]) -> dict[str, Answer]:
    """Key -> answer of a quiet engine, without the specs for which equal tokens are not promised."""
    async with AsyncClient(address) as client:

        async def one(spec: Spec, **changes: Any) -> RequestOutput:
            outputs = [output async for output in client.generate(spec.prompt, spec.sampling(**changes))]
            return outputs[-1]

        whole = await asyncio.gather(*map(one, specs))
        kept = {}
        for spec, output in zip(specs, whole, strict=True):
            answer = Answer.of(output)
            plain = spec.params.get("n", 1) == 1
            alone = await one(spec, **({"logprobs": 2} if plain else {}))
            is_safe = spec.params["temperature"] > 0 or not plain or margin(alone) > MARGIN
            if is_safe and Answer.of(alone).tokens == answer.tokens:
                kept[spec.key] = answer
        return kept


def margin(output: RequestOutput) -> float:
    """The smallest margin of the best logit over the second in an output, from the best two logprobs."""
    steps = output.outputs[0].logprobs or []
    best = [sorted((entry.logprob for entry in step.values()), reverse=True)[:2] for step in steps]
    return min((first - second for first, second in best), default=0.0)


def quiet_settings(model: str, num_ranks: int) -> dict[str, Any]:
    """Settings of the quiet engine. It has as many ranks as the server: another number adds up in another order, which
    shows at near ties."""
    settings = {"model": model, "device": "cpu", "dtype": "float32", "cpu_threads": 1, "log_level": "error"}
    return settings | {"num_gpu_blocks_override": 2048, "tensor_parallel_size": num_ranks}


class References(NamedTuple):
    """The requests of a run and their expected answers, by key."""

    specs: list[Spec]
    answers: dict[str, Answer]
    num_ranks: int


def make_references(model: str, seed: int, per_kind: int, longest: int, num_ranks: int = 1) -> References:
    with quiet_engine(quiet_settings(model, num_ranks)) as launched:
        specs = make_specs(seed, launched.engine.vocab_size, per_kind, longest)
        found = asyncio.run(asyncio.wait_for(answers(launched.address, specs), REFERENCE_S))
    return References([spec for spec in specs if spec.key in found], found, num_ranks)


def branches(model: str, references: References, forks: Collection[Fork]) -> dict[Fork, Answer]:
    """Compute the expected answers of forks. A fork begins at the position of its reader, so this is done
    afterwards."""
    by_key = {spec.key: spec for spec in references.specs}
    with quiet_engine(quiet_settings(model, references.num_ranks)) as launched:
        return {
            fork: branch(launched.session, by_key[fork.parent], fork, references.answers[fork.parent].tokens[0])
            for fork in forks
        }


def branch(session: Session, spec: Spec, fork: Fork, parent: list[int]) -> Answer:
    """Compute a fork of `spec` as a request that begins after the tokens inherited from `parent`."""
    tokens, reasons, done = parent[: fork.have], [], threading.Event()

    def sink(events: list[Event]) -> None:
        for event in events:
            tokens.extend(() if isinstance(event, StreamFailure) else event.token_ids)
            if not isinstance(event, Tokens):
                reasons.append(str(event.error) if isinstance(event, StreamFailure) else event.error or event.reason)
                done.set()

    params = SamplingParams(**fork.params)
    output = pack_tokens(tokens)
    session.submit(Generate(os.urandom(8).hex(), pack_tokens(spec.prompt), params, fork.have, output), sink)
    if not done.wait(REFERENCE_S):
        raise TimeoutError(f"the reference of a fork of {spec.key} did not come in {REFERENCE_S:g} s")
    return Answer([tokens], list(reasons))
