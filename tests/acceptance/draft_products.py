"""Requests of every kind, answered with drafts and without: under `--deterministic` each token and logprob is the same.

    python -m tests.acceptance.draft_products COUNT [SEED]

A request draws its features by its number: greedy or seeded with filters, penalties, biases, banned words, grammars
(schemas, calls of tools, regular expressions), two samples, adapters, logprobs, stop ids, salts. Its prompt may be one
that others have, or repeat itself. Each way of drafting answers its part of the requests, some of them where sequences
are preempted, on two ranks, or while workers are killed. What each engine decided is recorded, and decided again.
"""

import asyncio
import os
import random
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.checkpoints import VOCAB_SIZE, make_checkpoint, make_kin
from tests.deadlines import scaled
from tests.e2e.test_processes import family
from tests.eagle_heads import make_eagle
from tests.families.hybrid import VARIANTS as HYBRIDS
from tests.lora_adapters import ALL_LINEAR, make_adapter
from tests.mtp_heads import add_head
from vllm_lite import LLM, AsyncClient, RequestOutput, SamplingParams
from vllm_lite.client.engines.launch import launch
from vllm_lite.client.lora import LoRARequest
from vllm_lite.config import EngineConfig
from vllm_lite.engine.observe.replay import Replay
from vllm_lite.errors import RequestError
from vllm_lite.protocol.params import RequestOutputKind
from vllm_lite.protocol.structured import StructuredOutputsParams
from vllm_lite.trace import records
from vllm_lite.trace.reader import TraceReader

DEADLINE_S = scaled(300.0)
LONGEST = 120
"""Maximum tokens of a prompt; an answer has at most 24."""
FEW_BLOCKS = {"num_gpu_blocks_override": 40, "max_num_seqs": 16}
SELF = {"speculative_config": {"method": "self", "num_speculative_tokens": 3}}
SUFFIX = {"speculative_config": {"method": "suffix", "num_speculative_tokens": 6}}
NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
KIN = {"speculative_config": {"method": "draft_model", "model": "kin", "num_speculative_tokens": 4}}
EAGLE = {"speculative_config": {"method": "eagle3", "model": "eagle", "num_speculative_tokens": 3}}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}
FIXED = {"disable_adaptive_drafts": True}
KILLED = {"killed": SELF, "hybrid, self, killed": SELF, "draft model, killed": KIN, "mtp, killed": MTP}
WAYS: Mapping[str, dict[str, Any]] = {
    "forced alone": {},
    "ngram": NGRAM | FIXED,
    "suffix, as many as pay": SUFFIX,
    "suffix, swapped": SUFFIX | FIXED | FEW_BLOCKS | {"preemption_mode": "swap", "swap_space": 0.05},
    "self": SELF | FIXED,
    "self, as many as pay": SELF,
    "self, one step in flight": SELF | FIXED | {"async_scheduling": False},
    "self, recomputed": SELF | FIXED | FEW_BLOCKS | {"preemption_mode": "recompute"},
    "self, swapped": SELF | FIXED | FEW_BLOCKS | {"preemption_mode": "swap", "swap_space": 0.05},
    "self, two ranks": SELF | FIXED | {"tensor_parallel_size": 2},
    "self, chunks": SELF | FIXED | {"max_num_batched_tokens": 48},
    "hybrid, self": SELF | FIXED,
    "hybrid, self, as many as pay": SELF,
    "hybrid, self, recomputed": SELF | FIXED | FEW_BLOCKS | {"preemption_mode": "recompute"},
    "hybrid, self, swapped": SELF | FIXED | FEW_BLOCKS | {"preemption_mode": "swap", "swap_space": 0.05},
    "hybrid, self, two ranks": SELF | FIXED | {"tensor_parallel_size": 2},
    "hybrid, self, chunks": SELF | FIXED | {"max_num_batched_tokens": 48},
    "draft model": KIN | FIXED,
    "draft model, as many as pay": KIN,
    "draft model, recomputed": KIN | FIXED | FEW_BLOCKS | {"preemption_mode": "recompute"},
    "draft model, swapped": KIN | FIXED | FEW_BLOCKS | {"preemption_mode": "swap", "swap_space": 0.05},
    "draft model, two ranks": KIN | FIXED | {"tensor_parallel_size": 2},
    "draft model, chunks": KIN | FIXED | {"max_num_batched_tokens": 48},
    "eagle3": EAGLE | FIXED,
    "eagle3, as many as pay": EAGLE,
    "eagle3, swapped": EAGLE | FIXED | FEW_BLOCKS | {"preemption_mode": "swap", "swap_space": 0.05},
    "eagle3, two ranks": EAGLE | FIXED | {"tensor_parallel_size": 2},
    "eagle3, chunks": EAGLE | FIXED | {"max_num_batched_tokens": 48},
    "attention, mtp": MTP | FIXED,
    "attention, mtp, as many as pay": MTP,
    "attention, mtp, swapped": MTP | FIXED | FEW_BLOCKS | {"preemption_mode": "swap", "swap_space": 0.05},
    "attention, mtp, two ranks": MTP | FIXED | {"tensor_parallel_size": 2},
    "mtp": MTP | FIXED,
    "mtp, as many as pay": MTP,
    "mtp, one step in flight": MTP | FIXED | {"async_scheduling": False},
    "mtp, recomputed": MTP | FIXED | FEW_BLOCKS | {"preemption_mode": "recompute"},
    "mtp, swapped": MTP | FIXED | FEW_BLOCKS | {"preemption_mode": "swap", "swap_space": 0.05},
    "mtp, two ranks": MTP | FIXED | {"tensor_parallel_size": 2},
    "mtp, chunks": MTP | FIXED | {"max_num_batched_tokens": 48},
    **{way: settings | FIXED for way, settings in KILLED.items()},
}
"""Settings with drafts. The draft model "kin" and the head "eagle" are made together with the model. Ways of MTP and of
hybrids use a hybrid with a head; ways of attention with MTP use a model that has a head, too."""
TOOL: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"enum": [1, 2, 3]}},
}
TOOL |= {"required": ["city", "days"], "additionalProperties": False}
CALL: dict[str, Any] = {"type": "object", "properties": {"name": {"const": "get_weather"}, "arguments": TOOL}}
CALL |= {"required": ["name", "arguments"], "additionalProperties": False}
PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}, "ok": {"type": "boolean"}}}
FORMS: tuple[dict[str, Any], ...] = (
    {"json": PERSON},
    {"json": CALL},
    {"regex": "(yes|no|perhaps), [0-9]{1,4}"},
    {"choice": ["The quick brown fox", "The quick brown dog"]},
)


class Asked(NamedTuple):
    """One request."""

    prompt: list[int]
    params: SamplingParams
    adapter: str


Answer = list[tuple[list[int], Any, str | None]]
"""For each sample: its tokens, its logprobs, and the reason for which it ended."""


def ask(number: int, seed: int) -> Asked:
    """The request of this number."""
    rng = random.Random(f"{seed}/{number}")
    params: dict[str, Any] = {"max_tokens": rng.choice((1, 4, 12, 24)), "ignore_eos": rng.random() < 0.8}
    params["temperature"] = rng.choice((0.0, 1.0, 1.0, 0.6))
    params |= {"seed": rng.randrange(1 << 40), "output_kind": RequestOutputKind.FINAL_ONLY}
    if rng.random() < 0.3:
        params |= {"top_k": rng.choice((0, 5, 40)), "top_p": rng.choice((1.0, 0.8)), "min_p": rng.choice((0.0, 0.05))}
    if rng.random() < 0.2:
        params |= {"presence_penalty": 0.6, "repetition_penalty": rng.choice((1.0, 1.2))}
    if rng.random() < 0.3:
        params["structured_outputs"] = StructuredOutputsParams(**rng.choice(FORMS))
    if rng.random() < 0.2 and "structured_outputs" not in params:
        params["bad_words_token_ids"] = [[rng.randrange(3, VOCAB_SIZE)] for _ in range(8)]
    if rng.random() < 0.15:
        params["logit_bias"] = {rng.randrange(3, VOCAB_SIZE): 4.0}
    if rng.random() < 0.2:
        params["stop_token_ids"] = [rng.randrange(3, VOCAB_SIZE) for _ in range(20)]
        params["min_tokens"] = min(rng.choice((0, 3)), params["max_tokens"])
    if rng.random() < 0.4:
        params["logprobs"] = rng.choice((0, 3))
    if rng.random() < 0.15:
        params["n"] = 2
    if rng.random() < 0.2:
        params["cache_salt"] = rng.choice(("one", "other"))
    return Asked(_prompt(rng), SamplingParams(**params), rng.choice(("", "", "first", "second")))


def _prompt(rng: random.Random) -> list[int]:
    """A unique prompt, one with the beginning of others, or one that repeats itself, so that drafts are found."""
    length, kind = rng.randrange(1, LONGEST), rng.random()
    if kind < 0.3:
        return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
    source = random.Random(rng.randrange(4))
    stem = [source.randrange(3, VOCAB_SIZE) for _ in range(LONGEST)]
    return stem[:length] if kind < 0.7 else (stem[: rng.randrange(1, 6)] * LONGEST)[:length]


def answer_of(output: RequestOutput) -> Answer:
    return [(list(one.token_ids), one.logprobs, one.finish_reason) for one in output.outputs]


class Models(NamedTuple):
    """A model that answers requests, and its adapters."""

    base: Path
    modules: tuple[dict[str, str], ...]
    kin: Path | None = None
    eagle: Path | None = None
    hybrid: "Models | None" = None
    """The model of ways that draft with a head, or over recurrent states."""

    def of(self, way: str) -> "Models":
        return self.hybrid if way.startswith(("mtp", "hybrid")) and self.hybrid is not None else self

    def with_drafter(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The settings, with the folder of the draft model or head filled in."""
        speculation = settings.get("speculative_config")
        if not speculation or "model" not in speculation:
            return settings
        return settings | {"speculative_config": speculation | {"model": str(getattr(self, speculation["model"]))}}

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "dtype": "bfloat16",
            "deterministic": True,
            "cpu_threads": 1,
            "num_gpu_blocks_override": 1024,
            "log_level": "error",
            "ready_timeout_s": DEADLINE_S,
            "heartbeat_timeout_s": DEADLINE_S,
        } | ({"enable_lora": True, "max_loras": 2, "lora_modules": self.modules} if self.modules else {})


def make_models(folder: Path) -> Models:
    base = add_head(make_checkpoint(folder / "model", "llama", dtype="bfloat16"))
    headed = add_head(HYBRIDS[0].make(folder / "hybrid"))
    hybrid = Models(headed, _modules(headed, folder / "of-hybrid", r".*self_attn\.[qkvo]_proj"))
    head = make_eagle(base, folder / "eagle", eagle_aux_hidden_state_layer_ids=[1, 2, 2])
    return Models(base, _modules(base, folder), make_kin(base, folder / "kin"), head, hybrid)


def _modules(base: Path, folder: Path, targets: str = ALL_LINEAR) -> tuple[dict[str, str], ...]:
    names = ("first", "second")
    paths = [make_adapter(base, folder / name, targets, seed=place) for place, name in enumerate(names)]
    return tuple({"name": name, "path": str(path)} for name, path in zip(names, paths, strict=True))


def answers(llm: LLM, asked: list[Asked]) -> list[Answer]:
    """The answers of an engine to all requests, sent at once."""
    prompts, params = [one.prompt for one in asked], [one.params for one in asked]
    adapters = [LoRARequest(one.adapter) if one.adapter else None for one in asked]
    return [answer_of(output) for output in llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)]


@contextmanager
def engine(models: Models, **settings: Any) -> Iterator[LLM]:
    with LLM(models.base, single_process=True, **models.with_drafter(models.settings | settings)) as llm:
        yield llm


async def _killed(address: str, pid: int, asked: list[Asked], num_kills: int) -> tuple[list[Answer], int]:
    """Answers while workers are killed, and the number of restarts."""
    done = asyncio.Semaphore(0)

    async def one(client: AsyncClient, each: Asked) -> Answer:
        adapter = LoRARequest(each.adapter) if each.adapter else None
        for _ in range(num_kills + 1):
            found: Answer = []
            try:
                async for output in client.generate(each.prompt, each.params, lora_request=adapter):
                    found = answer_of(output)
            except RequestError as error:  # its adapter was being read when the workers died: ask again
                if "ask again" not in str(error):
                    raise
                continue
            break
        done.release()
        return found

    async with AsyncClient(address) as client:
        tasks = [asyncio.ensure_future(one(client, each)) for each in asked]
        for _ in range(num_kills):
            for _ in range(len(asked) // (num_kills + 2)):
                await asyncio.wait_for(done.acquire(), DEADLINE_S)
            os.kill(family(pid)[1], signal.SIGKILL)
        found = await asyncio.wait_for(asyncio.gather(*tasks), DEADLINE_S)
        return list(found), (await client.stats()).generation - 1


def killed_answers(models: Models, asked: list[Asked], num_kills: int = 2, **settings: Any) -> tuple[list[Answer], int]:
    """The results of `answers` while workers are killed, and the number of replacements."""
    given = models.with_drafter(models.settings | settings)
    launched = launch(EngineConfig.check({"model": str(models.base)} | given))
    try:
        return asyncio.run(_killed(launched.address, launched.pid, asked, num_kills))
    finally:
        launched.close()


def compare(asked: list[Asked], got: list[Answer], expected: list[Answer]) -> list[str]:
    """One line for each request whose answers differ."""
    differing = [place for place, pair in enumerate(zip(got, expected, strict=True)) if pair[0] != pair[1]]
    return [f"request {place} {asked[place]}: {got[place]} instead of {expected[place]}" for place in differing]


def part_of(place: int, share: int, seed: int) -> list[Asked]:
    """The requests of one way to draft."""
    return [ask(number, seed) for number in range(place * share, (place + 1) * share)]


def drafted(models: Models, way: str, asked: list[Asked], trace: Path) -> tuple[list[Answer], str]:
    """Answers of one way to draft, and a sentence with the counts of what it did. Writes its decisions to `trace`."""
    settings = WAYS[way] | {"record": str(trace)}
    if way in KILLED:
        got, num_deaths = killed_answers(models, asked, 3, **settings)
        return got, f"workers were killed {num_deaths} times"
    with engine(models, **settings) as llm:
        got, stats = answers(llm, asked), llm.stats()
    return got, f"{stats.accepted_tokens} of {stats.draft_tokens} drafts, {stats.preemptions} preemptions"


def num_verifying(trace: Path) -> int:
    """Number of recorded steps that verified drafts."""
    return sum(isinstance(record, records.Result) and bool(record.drafted) for record in TraceReader(str(trace)))


def decided_again(trace: Path) -> list[str]:
    """One line if the engine that recorded `trace` would not decide the same again."""
    divergence = Replay(str(trace)).run().divergence
    return [] if divergence is None else [f"replay: {divergence}"]


def plain_settings(way: str) -> dict[str, Any]:
    """Settings of the reference engine: of all settings, bits depend only on the number of ranks."""
    return {"jump_forward": False, "tensor_parallel_size": WAYS[way].get("tensor_parallel_size", 1)}


def main(count: int, seed: int) -> int:
    num_different = 0
    with tempfile.TemporaryDirectory() as folder:
        models = make_models(Path(folder))
        for place, way in enumerate(WAYS):
            asked, trace = part_of(place, -(-count // len(WAYS)), seed), Path(folder) / f"trace{place}"
            with engine(models.of(way), **plain_settings(way)) as llm:
                expected = answers(llm, asked)
            got, shown = drafted(models.of(way), way, asked, trace)
            found = compare(asked, got, expected) + decided_again(trace)
            shown += f"; {num_verifying(trace)} steps with drafts decided again"
            num_different += len(found)
            print(f"{way}: {len(found)} of {len(got)} different; {shown}", *found[:3], sep="\n  ", flush=True)
    return num_different


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1) > 0)
