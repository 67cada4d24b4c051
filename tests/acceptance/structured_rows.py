"""The rows of structured_check.py: each is one engine, which must give the same valid outputs as the first row of its
kind."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from tests.acceptance.structured_cases import SPELLED_END, Case, behind_thinking, closing_bias, params_of, thinking_of
from vllm_lite import LLM, RequestOutput, SamplingParams
from vllm_lite.config import demo_folder
from vllm_lite.errors import VllmLiteError
from vllm_lite.protocol.stats import Stats

SPECULATION = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
NGRAM: dict[str, Any] = {"speculative_config": SPECULATION, "disable_adaptive_drafts": True}
SWAP: dict[str, Any] = {"swap_space": 1e-3, "preemption_mode": "swap"}
BLOCK_SIZE = 8
ALL_GREEDY, ALL_SAMPLED = "greedy", "sampled"
SHOWN = 5
STEM = "Once upon a time there was a small bear who lived in a house at the edge of the forest. "
"""Beginning of every second prompt, so that prefixes are found in the cache."""


@dataclass(frozen=True)
class Row:
    """One engine, and the requests that it gets. Rows of one `kind` must give the same tokens."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    kind: str = "plain"
    num_samples: int = 1
    thinks: bool = False
    rounds: int = 1
    tiny_pool: bool = False
    must: tuple[str, ...] = ()
    """Counters of the engine that must not be 0; otherwise the row would prove nothing."""


def make_rows(longest: int) -> list[Row]:
    """All rows. Sequences have at most `longest` tokens, which determines the size of the tiny pools."""
    tiny = {"num_gpu_blocks_override": -(-longest // BLOCK_SIZE) + 3}
    drafts, preempted = ("accepted_tokens",), ("preemptions",)
    return [
        Row("plain", {"jump_forward": False}),
        Row("jump-forward", must=drafts),
        Row("n-gram", NGRAM, must=drafts),
        Row("one step at a time", {"async_scheduling": False}),
        Row("one step at a time, n-gram", NGRAM | {"async_scheduling": False}, must=drafts),
        Row("chunks of 7", {"max_num_batched_tokens": 7, "max_num_seqs": 7}),
        Row("prefix hits", rounds=2, must=("cached_tokens",)),
        Row("preempted, recomputed", tiny, must=preempted),
        Row("preempted, recomputed, n-gram", tiny | NGRAM, must=(*preempted, *drafts)),
        Row("preempted, swapped", tiny | SWAP, must=("swaps",)),
        Row("preempted, swapped, n-gram", tiny | SWAP | NGRAM, must=("swaps", *drafts)),
        Row("n = 2", kind="n2", num_samples=2),
        Row("n = 2, n-gram", NGRAM, kind="n2", num_samples=2, must=drafts),
        Row("thinking", {"jump_forward": False}, kind="thinking", thinks=True),
        Row("thinking, jump-forward", kind="thinking", thinks=True, must=drafts),
        Row("thinking, n-gram", NGRAM, kind="thinking", thinks=True, must=drafts),
        Row("thinking, one step at a time, n-gram", NGRAM | {"async_scheduling": False}, kind="thinking", thinks=True),
        Row("thinking, preempted, n-gram", tiny | NGRAM, kind="thinking", thinks=True, must=preempted),
        Row("thinking, swapped", tiny | SWAP, kind="thinking", thinks=True, must=("swaps",)),
        Row("two ranks", {"tensor_parallel_size": 2}, kind="tp2"),
        Row("two ranks, n-gram", NGRAM | {"tensor_parallel_size": 2}, kind="tp2", must=drafts),
        Row("two ranks, preempted", tiny | {"tensor_parallel_size": 2}, kind="tp2", must=preempted),
        Row("two ranks, thinking", {"tensor_parallel_size": 2}, kind="tp2-thinking", thinks=True),
        Row("two ranks, thinking, n-gram", NGRAM | {"tensor_parallel_size": 2}, kind="tp2-thinking", thinks=True),
    ]


@dataclass
class Result:
    """Result of one row. Faults are sentences; none means that the row is right."""

    row: Row
    tokens: dict[tuple[str, int], list[list[int]]] = field(default_factory=dict)
    """(way of sampling, position in the corpus) -> the tokens of each sample of this request."""
    faults: list[str] = field(default_factory=list)
    finished: int = 0
    cut: int = 0
    invalid: int = 0
    different: int = 0
    seconds: float = 0.0
    stats: Stats = field(default_factory=Stats)


class Matrix:
    """Runs rows over cases, and compares them with the results of the first row of each kind."""

    def __init__(self, cases: Sequence[Case], *, max_tokens: int, **settings: Any) -> None:
        """`settings`: common settings of all engines."""
        self.cases = [case for case in cases if not case.refused]
        self.max_tokens = max_tokens
        self.settings: dict[str, Any] = {
            "cpu_threads": 1,
            "dtype": "float32",
            "block_size": BLOCK_SIZE,
            "num_gpu_blocks_override": 4096,
            "max_num_seqs": 16,
            "log_level": "error",
        } | settings
        self.tokenizer = tokenizers.Tokenizer.from_file(str(Path(demo_folder()) / "tokenizer.json"))
        self.bias = closing_bias(self.tokenizer.get_vocab(), [1, 4])
        self.spelled = tuple(self.tokenizer.encode(SPELLED_END, add_special_tokens=False).ids)
        self.prompts = [f"{STEM if place % 2 else ''}{case.name}: " for place, case in enumerate(self.cases)]
        self.first: dict[str, Result] = {}

    @property
    def longest(self) -> int:
        """Maximum tokens of a prompt with its output."""
        return max(len(self.tokenizer.encode(prompt).ids) for prompt in self.prompts) + self.max_tokens

    def run(self, row: Row) -> Result:
        """Run all cases on one engine, greedy and sampled."""
        result = Result(row)
        started_s = time.monotonic()
        try:
            with LLM(**(self.settings | row.settings)) as llm:
                for _ in range(row.rounds):
                    for way in (ALL_GREEDY, ALL_SAMPLED):
                        params = [self.params(place, row, way) for place in range(len(self.cases))]
                        outputs = llm.generate(self.prompts, params, use_tqdm=False)
                        self._take(result, way, params, outputs)
                result.stats = llm.stats()
        except VllmLiteError as error:
            result.faults.append(f"the row failed: {error}")
            return result
        finally:
            result.seconds = time.monotonic() - started_s
        self._check_counters(result)
        self._compare(result)
        return result

    def params(self, place: int, row: Row, way: str) -> SamplingParams:
        """Sampling parameters of a case in a row. Some greedy requests go without bias: their drafts are the model's
        own."""
        greedy = way == ALL_GREEDY
        bias = {} if greedy and place % 3 == 0 else self.bias
        params = params_of(place, self.cases[place], greedy=greedy, max_tokens=self.max_tokens, bias=bias)
        params = params.clone(n=row.num_samples)
        if not row.thinks:
            return params
        thinking = thinking_of(place, self.spelled)
        starts = {2: 11.0, 3: 11.0}  # or the model, which knows no such mark, would never think, nor end it
        return params.clone(thinking=thinking, logit_bias=self.bias | starts)

    def _take(
        self, result: Result, way: str, params: Sequence[SamplingParams], outputs: Sequence[RequestOutput]
    ) -> None:
        for place, (asked, output) in enumerate(zip(params, outputs, strict=True)):
            tokens = [list(sample.token_ids) for sample in output.outputs]
            before = result.tokens.setdefault((way, place), tokens)
            if before != tokens:
                self._differs(result, way, place, before, tokens)
            for sample in output.outputs:
                if sample.finish_reason == "length":
                    result.cut += 1
                elif (wrong := self._wrong(self.cases[place], asked, sample)) is not None:
                    result.invalid += 1
                    result.faults.append(f"{way} {self.cases[place].name}: {wrong}: {sample.text[-200:]!r}")
                else:
                    result.finished += 1

    def _wrong(self, case: Case, asked: SamplingParams, sample: Any) -> str | None:
        if sample.finish_reason != "stop":
            return f"ended with {sample.finish_reason}"
        if asked.thinking is None:
            return case.judge(sample.text)
        try:
            answer = behind_thinking(sample.token_ids, asked.thinking)
        except ValueError as error:
            return str(error)
        return "ended before its thinking did" if answer is None else case.judge(self.tokenizer.decode(answer))

    def _check_counters(self, result: Result) -> None:
        for name in result.row.must:
            if not getattr(result.stats, name):
                result.faults.append(f"{name} is 0: the row shows nothing")
        stats = result.stats
        if stats.num_running or stats.num_waiting or stats.num_used_blocks or stats.num_used_host_blocks:
            result.faults.append(f"something was left behind: {stats}")

    def _compare(self, result: Result) -> None:
        """Compare a result with the first row of the kind; the first sample of n = 2 must equal that of a plain row."""
        first = self.first.setdefault(result.row.kind, result)
        for (way, place), tokens in result.tokens.items():
            if first is not result and tokens != first.tokens[way, place]:
                self._differs(result, way, place, first.tokens[way, place], tokens)
        plain = self.first.get("plain")
        if result.row.num_samples > 1 and plain is not None:
            for (way, place), tokens in result.tokens.items():
                if tokens[:1] != plain.tokens[way, place]:
                    self._differs(result, way, place, plain.tokens[way, place], tokens[:1])

    def _differs(self, result: Result, way: str, place: int, one: list[list[int]], other: list[list[int]]) -> None:
        result.different += 1
        texts = [self.tokenizer.decode(tokens[0])[:160] for tokens in (one, other)]
        result.faults.append(f"{way} {self.cases[place].name}: tokens differ: {texts[0]!r} and {texts[1]!r}")


def show(result: Result) -> None:
    """One line of the table, and its first faults."""
    stats = result.stats
    print(
        f"{result.row.name:42} {result.finished:5} {result.cut:5} {result.invalid:4} {result.different:4} "
        f"{stats.generated_tokens:7} {stats.steps:6} {stats.accepted_tokens:6}/{stats.draft_tokens:<6} "
        f"{stats.preemptions:5} {stats.swaps:5} {stats.cached_tokens:6} {result.seconds:6.1f}",
        flush=True,
    )
    for fault in result.faults[:SHOWN]:
        print("   ", fault, file=sys.stderr)
    if len(result.faults) > SHOWN:
        print(f"    ... and {len(result.faults) - SHOWN} more", file=sys.stderr)


HEAD = (
    f"{'row':42} {'whole':>5} {'cut':>5} {'bad':>4} {'diff':>4} {'tokens':>7} {'steps':>6} "
    f"{'accepted/drafted':>13} {'pre':>3} {'swaps':>5} {'cached':>6} {'s':>6}"
)
