"""Compare every family of models with transformers through whole engines: prefix cache, preemption, chunks, drafts,
ranks.

    python -m tests.acceptance.families_check
    python -m tests.acceptance.families_check --only gemma --rows preempted

Each variant of `tests/families` is a tiny random checkpoint. Its greedy tokens in float32 have to be those of
transformers in every row, but for ties (logits closer than 0.001), and the log-probabilities of the five best tokens
within 2e-4. Exit status: 0 if all held, 1 if something did not.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers

from tests.checkpoints import VOCAB_SIZE
from tests.e2e.reference import Case, Reference, compare, start
from tests.families.all import VARIANTS
from tests.families.variant import Variant
from vllm_lite import RequestOutput, SamplingParams
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.layer_specs.rope import Dynamic, LongRope
from vllm_lite.checkpoint.model_spec import ModelSpec

LENGTHS = (1, 7, 8, 16, 31, 48, 65, 100, 129, 160, 200)
"""Prompt lengths, shorter and longer than windows, chunks and blocks."""
NUM_TOKENS = 24
MAX_LOGPROB_ERROR = 2e-4
"""Maximum error of a token's logprob. transformers in float32 is itself up to 1.3e-4 away from its own results in
float64."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=5)
SPECULATION = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
NGRAM: dict[str, Any] = {"speculative_config": SPECULATION, "disable_adaptive_drafts": True}
MAX_MODEL_LEN = max(LENGTHS) + NUM_TOKENS


@dataclass(frozen=True)
class Row:
    """One engine. `must`: events that have to happen for at least one variant; otherwise the row would prove
    nothing."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    rounds: int = 1
    tiny_pool: bool = False
    must: str = ""
    logprobs: float = MAX_LOGPROB_ERROR


ROWS = [
    Row("whole prompts"),
    Row("prefix hits", {"block_size": 8}, rounds=2, must="cached_tokens"),
    Row("chunks of 7", {"max_num_batched_tokens": 7, "max_num_seqs": 7, "enable_prefix_caching": False}),
    Row("one step at a time", {"async_scheduling": False, "max_num_batched_tokens": 64}),
    Row("eager", {"enforce_eager": True}),
    Row("preempted, recomputed", tiny_pool=True, must="preemptions"),
    Row("preempted, swapped", {"swap_space": 1e-2, "preemption_mode": "swap"}, tiny_pool=True, must="swaps"),
    Row("n-gram", NGRAM, must="accepted_tokens"),
    Row("n-gram, preempted", NGRAM, tiny_pool=True, must="preemptions"),
    Row("two ranks", {"tensor_parallel_size": 2}, logprobs=4e-4),
    Row("two ranks, preempted", {"tensor_parallel_size": 2}, tiny_pool=True, must="preemptions", logprobs=4e-4),
    Row("reference kernels", {"attention_backend": "reference", "enforce_eager": True}),
]


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    """Random tokens; every second prompt begins like the others of its kind."""
    source = random.Random(5)
    stem = [source.randrange(3, VOCAB_SIZE) for _ in range(120)]
    made = []
    for place, length in enumerate(lengths):
        tokens = [source.randrange(3, VOCAB_SIZE) for _ in range(length)]
        made.append((stem + tokens[120:])[:length] if place % 2 else tokens)
    return made


def comparable(spec: ModelSpec, num_tokens: int) -> bool:
    """Whether transformers rotates heads as the engine does for a prompt of this length: it chooses the rope by the
    prompt's length, the engine by max_model_len."""
    for scaling in {layer.rope.scaling for layer in spec.layers if layer.rope is not None}:
        if isinstance(scaling, Dynamic):
            return False
        if isinstance(scaling, LongRope) and (num_tokens > scaling.original) != (scaling.original < MAX_MODEL_LEN):
            return False
    return True


def logprob_error(cases: Sequence[Case], outputs: Sequence[RequestOutput]) -> float:
    """The largest error of the five best tokens' log-probabilities, as far as the tokens agree."""
    worst = 0.0
    for case, output in zip(cases, outputs, strict=True):
        theirs = case.logits.log_softmax(-1)
        for at, (token, ours) in enumerate(
            zip(output.outputs[0].token_ids, output.outputs[0].logprobs or (), strict=True)
        ):
            if token != case.tokens[at]:
                break
            worst = max([worst, *(abs(entry.logprob - float(theirs[at, id_])) for id_, entry in ours.items())])
    return worst


def check(path: Path, cases: Sequence[Case], row: Row, happened: Counter[str]) -> list[str]:
    """Return the faults of a row as sentences. `happened` counts the events that rows must see."""
    faults = []
    settings = {"max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": 512} | row.settings
    if row.tiny_pool:  # room for the longest sequence in every group, and a little more
        spec = load_spec(path).shared_by(row.settings.get("tensor_parallel_size", 1))  # more groups on more ranks
        num_blocks = len(spec.kv_groups) * (-(-MAX_MODEL_LEN // 8) + 1) + 3
        settings |= {"block_size": 8, "num_gpu_blocks_override": num_blocks}
    with start(path, **settings) as llm:
        for _ in range(row.rounds):
            outputs = llm.generate([case.prompt for case in cases], GREEDY, use_tqdm=False)
            comparison = compare(cases, outputs)
            if comparison.wrong:
                faults.append(f"other tokens for prompts {comparison.wrong}")
            error = logprob_error(cases, outputs)
            if error > row.logprobs:
                faults.append(f"a log-probability differs by {error:.1e}")
        if row.must:
            happened[row.name] += getattr(llm.stats(), row.must)
    return faults


def check_variant(
    variant: Variant, rows: Sequence[Row], happened: Counter[str], lengths: Sequence[int] = LENGTHS
) -> int:
    """Run all rows with prompts of these lengths, at most those of LENGTHS; returns how many failed."""
    started, failed = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="vl-family-") as folder:
        path = variant.make(Path(folder) / "model")
        reference = Reference(path)
        cases = []
        spec = load_spec(path)
        for prompt in (prompt for prompt in prompts(lengths) if comparable(spec, len(prompt))):
            case = reference.generate(prompt)
            cases.append(Case(prompt, case.tokens[:NUM_TOKENS], case.logits[:NUM_TOKENS]))
        if not cases:
            print(f"{variant.name:32} is left out: its rope in transformers depends on each request's length")
            return 0
        for row in rows:
            try:
                faults = check(path, cases, row, happened)
            except Exception as error:
                faults = [f"{type(error).__name__}: {error}"]
            for fault in faults:
                print(f"    {variant.name}, {row.name}: {fault}", flush=True)
            failed += bool(faults)
    distinct = sum(len(set(case.tokens)) for case in cases) / len(cases)
    took = f"{time.monotonic() - started:5.1f} s"
    print(
        f"{variant.name:32} {len(rows) - failed:3} of {len(rows)} rows, {distinct:4.1f} distinct tokens, {took}",
        flush=True,
    )
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only variants whose name contains this")
    parser.add_argument("--rows", default="", help="only rows whose name contains this")
    args = parser.parse_args()
    transformers.logging.disable_progress_bar()
    rows = [row for row in ROWS if args.rows in row.name]
    variants = [variant for variant in VARIANTS if args.only in variant.name]
    happened: Counter[str] = Counter()
    failed = sum(check_variant(variant, rows, happened) for variant in variants)
    for row in rows:
        if row.must and not happened[row.name]:
            print(f"    {row.name}: no variant had any {row.must}")
            failed += 1
    print(f"{len(variants)} variants, {len(rows)} rows each: {failed} failed")
    return 1 if failed or not variants else 0


if __name__ == "__main__":
    sys.exit(main())
