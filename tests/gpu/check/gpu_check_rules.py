"""Rules that say what to change because of the findings of `gpu_check`, which prints them with its results. Run alone,
this script prints all rules.

They are for people who have a GPU for ten minutes. "share" is the share of the copy bandwidth measured in the same run;
for prefill the speed relative to torch's best attention; for steps the device's time over the wall time.
"""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

BY_TOKEN, IN_CHUNKS = "recurrent, by token: ", "recurrent, in chunks: "
"""As in gpu_check_recurrent.py."""


class Rows:
    """The rows of one run, found by their kernel and by a part of their shape."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self._rows = rows

    def get(self, figure: str, kernel: str, shape: str = "") -> float | None:
        """A figure of the last such row; None if there is none."""
        fitting = [row for row in self._rows if row["kernel"] == kernel and re.search(shape, str(row["shape"]))]
        return next((float(row[figure]) for row in reversed(fitting) if row.get(figure) is not None), None)

    def ratio(self, one: str, other: str, shape: str = "", figure: str = "us") -> float | None:
        """Ratio of the figure of `one` to that of `other`."""
        above, below = self.get(figure, one, shape), self.get(figure, other, shape)
        return None if above is None or not below else above / below


Measure = Callable[[Rows], float | None]


@dataclass(frozen=True)
class Rule:
    """If the result of `measure` is above the bound (or, with a minus sign, below it), `then` says what to do."""

    when: str
    measure: Measure
    bound: float
    then: str
    below: bool = False

    def said(self, rows: Rows) -> str:
        value = self.measure(rows)
        if value is None:
            return f"?  {self.when}: not measured"
        if (value < self.bound) if self.below else (value > self.bound):
            return f"-> {self.when}: {value:.2f}. {self.then}"
        return f"ok {self.when}: no, {value:.2f}"


def _gap_us(kernel: str, shape: str) -> Measure:
    def gap(rows: Rows) -> float | None:
        wall, device = rows.get("us", kernel, shape), rows.get("device_us", kernel, shape)
        return None if wall is None or not device else wall - device

    return gap


LARGE, SMALL = "batch 64 ctx 8192 gqa 4", "batch 1 ctx 32768 gqa 4"
SHARED = "decode, 4096 in common: read once", "decode, 4096 in common: each by itself"
DECODE, PREFILL = "decode_attention", "prefill_attention, paged"
RULES = (
    Rule(
        "decode over 32 layers in a block takes more than 1.05 of that over one layer",
        lambda rows: rows.ratio("decode, 32 layers in a block", "decode, 1 layers in a block", "ctx 8192"),
        1.05,
        "Pools by layer: one place, worker/memory/cache_engine.py, as kernels take strides.",
    ),
    Rule(
        "decode attention at batch 64, context 8192 reads below 0.8 of the copy bandwidth",
        lambda rows: rows.get("share", DECODE, LARGE),
        0.8,
        "FETCH of decode_attention.py, if the rule on it says so; else a ring of cp.async for each warp. "
        "ncu's WarpStateStats say which: long scoreboard means more bytes in flight.",
        below=True,
    ),
    Rule(
        "tiles fetched ahead over those that are not, batch 64, context 8192",
        lambda rows: rows.ratio("decode_attention fetch", DECODE, LARGE + " HND$"),
        0.97,
        "FETCH = True in decode_attention.py, unless it takes more than 1.03 at batch 1, context 32768.",
        below=True,
    ),
    Rule(
        "tiles fetched ahead over those that are not, batch 1, context 32768",
        lambda rows: rows.ratio("decode_attention fetch", DECODE, SMALL + " HND$"),
        1.03,
        "Leave FETCH of decode_attention.py off.",
    ),
    Rule(
        "decode attention at batch 1, context 32768 reads below 0.5 of the copy bandwidth",
        lambda rows: rows.get("share", DECODE, SMALL),
        0.5,
        "More splits: tiles_a_split in merge_splits.cuh and attention_work.py.",
        below=True,
    ),
    Rule(
        "the default splits take more than 1.05 of splits of 1024 at batch 64, context 8192",
        lambda rows: rows.ratio(DECODE, "decode_attention split 1024", LARGE),
        1.05,
        "Longer splits: tiles_a_split in merge_splits.cuh and attention_work.py.",
    ),
    Rule(
        "the default splits take more than 1.05 of splits of 256 at batch 1, context 32768",
        lambda rows: rows.ratio(DECODE, "decode_attention split 256", SMALL),
        1.05,
        "Shorter splits: tiles_a_split in merge_splits.cuh and attention_work.py.",
    ),
    Rule(
        "5 rows of 64 sequences: decode kernel over prefill kernel",
        lambda rows: rows.ratio("few rows: decode", "few rows: prefill", r"^64 x 5 "),
        1.0,
        "Lower MAX_SHORT_SPLITS of attention_work.py; below 0.8: raise it.",
    ),
    Rule(
        "16 rows behind 32768: decode kernel over prefill kernel",
        lambda rows: rows.ratio("few rows: decode", "few rows: prefill", r"^1 x 16 "),
        1.0,
        "Lower MAX_SHORT_ROWS of attention_work.py.",
    ),
    Rule(
        "64 rows behind 32768: decode kernel over prefill kernel",
        lambda rows: rows.ratio("few rows: decode", "few rows: prefill", r"^1 x 64 "),
        0.9,
        "Leave MAX_SHORT_ROWS as it is; at 0.9 or less raise it to 64.",
    ),
    Rule(
        "a decode launched for 131072 tokens over one launched for what there is, batch 64",
        lambda rows: rows.ratio("decode, list room for 131072", "decode, list exact", "batch 64"),
        1.03,
        "Fewer blocks: TARGET_BLOCKS of decode_attention.py.",
    ),
    Rule(
        "64 decodes with 4096 tokens in common: read once over each by itself",
        lambda rows: rows.ratio(*SHARED, "batch 64 .* gqa 4 "),
        0.97,
        "It does not pay: disable_cascade_attn of config.py becomes True by default.",
    ),
    Rule(
        "8 decodes with 4096 tokens in common: read once over each by itself",
        lambda rows: rows.ratio(*SHARED, "batch 8 .* gqa 4 "),
        1.0,
        "Raise WORTH of shared_prefix.py, by what 16 and 64 sequences gain. Below 0.9: lower it.",
    ),
    Rule(
        "64 decodes that share nothing: with the launch for what is shared over without",
        lambda rows: rows.ratio("decode, 1024 in common: nothing shared", "decode, 1024 in common: each by itself"),
        1.02,
        "Lower CASCADE_BLOCKS of decode_attention.py, or leave the launch out of graphs.",
    ),
    Rule(
        "our prefill of 4096 fresh tokens against torch's best",
        lambda rows: rows.get("share", PREFILL, r"^1 x 4096 new of 4096"),
        0.95,
        "Nothing for prompts that come whole: the table that this stage has kept sends them through torch. For the "
        "others, below 0.8: 32 rows a warp in prefill_attention.cuh.",
        below=True,
    ),
    Rule(
        "torch's varlen attention on contiguous K and V over our prefill, 16 x 512",
        lambda rows: rows.ratio("torch varlen, contiguous", PREFILL, r"^16 x 512 new of 512"),
        0.95,
        "Torch gains nothing by taking prompts of any lengths in one call. Not above: a way more for whole prompts.",
    ),
    Rule(
        "gathering pages for torch over our prefill, 2048 new of 16384",
        lambda rows: rows.ratio("gather + torch varlen", PREFILL, r"^1 x 2048 new of 16384"),
        0.9,
        "Our kernel stays for chunks with a prefix, as the table says by itself. Not above: they are gathered.",
    ),
    Rule(
        "128 rows of 28672 x 8192 by int4 tiles over widened weights",
        lambda rows: rows.ratio("linear, int4 g128", "linear, int4 g128, widened", "^128 rows, 28672"),
        1.0,
        "TILED_ROWS of packed_linear.py becomes 64, or 32 if that is so for 64 rows, too.",
    ),
    Rule(
        "the delta rule over 64 tokens in chunks, over token by token",
        lambda rows: rows.ratio(f"{IN_CHUNKS}delta rule", f"{BY_TOKEN}delta rule", r"^1 x 64 tokens"),
        1.0,
        "CHUNKED_ROWS of vllm_lite/kernels/cuda/recurrent.py becomes 256, or 1 << 30 if that is so there, too.",
    ),
    Rule(
        "32 rows of 28672 x 8192 by int4 tiles over codes alone",
        lambda rows: rows.ratio("linear, int4 g128", "linear, int4 g128, codes", "^32 rows, 28672"),
        1.0,
        "FEW_ROWS of packed_linear.py becomes 32.",
    ),
    Rule(
        "the sampler with top-k and top-p, 1 row, us",
        lambda rows: rows.get("us", "sampler pick", r"^1 x"),
        60,
        "More blocks a row: parts_for in vllm_lite/kernels/cuda/sampler.py.",
    ),
    Rule(
        "a decode step of the 1B model at batch 1 waits for the host, us",
        _gap_us("step, graphs", "1b 1 x"),
        150,
        "The gap between steps: the sampler's launches, then InputBatch.build; is the native library there?",
    ),
    Rule(
        "a decode step of the 8B model at batch 64 waits for the host, us",
        _gap_us("step, graphs", "8b 64 x"),
        300,
        "The copies of a step: DecodeInputs.load and CudaBackend.refresh.",
    ),
    Rule(
        "a mixed step of the 1B model: the device's share of the wall time",
        lambda rows: rows.get("share", "step, mixed", "1b"),
        0.85,
        "Launches cost more than they compute: are piecewise graphs on, and large enough for this step?",
        below=True,
    ),
    Rule(
        "memory in use over what gpu_memory_utilization allows",
        lambda rows: rows.get("share", "memory in use of allowed"),
        1.0,
        "What the profile does not know: compare the lines of `memory`, above all graphs and what they were predicted.",
    ),
    Rule(
        "eager over graphs in tokens per second, batch 8",
        lambda rows: rows.ratio("throughput, eager", "throughput, graphs", figure="tokens_s"),
        0.77,
        "Graphs gain little: look at the gap between steps.",
    ),
    Rule(
        "our tokens per second over vLLM's, 256 requests",
        lambda rows: rows.ratio("engine: ours", "engine: vllm", "^256 x", "tokens_s"),
        1.0,
        "Compare the steps above: the device's time first, then the wall.",
        below=True,
    ),
)


def said(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Apply every rule to these rows: first the rules that apply, last those without a measurement."""
    found = [rule.said(Rows(rows)) for rule in RULES]
    return sorted(found, key=lambda text: ("->", "ok", "? ").index(text[:2]))


def main() -> int:
    for rule in RULES:
        print(f"{rule.when} {'<' if rule.below else '>'} {rule.bound:g}:\n    {rule.then}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
