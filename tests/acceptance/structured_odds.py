"""Compare the frequencies of a small grammar's outputs with the model's own probabilities.

    python -m tests.acceptance.structured_odds --draws 4000

transformers computes the logits of every path that the grammar lets through; from them follows the probability of each
text. Engines with and without jump-forward and drafts then draw as many outputs as asked for, each with a seed of its
own, and a chi-square test compares the counts. Exit status: 0 if the outputs of every engine could well be such draws
(p above 0.001) and those of all engines are the same, 1 if not.
"""

import argparse
import sys
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.acceptance.structured_rows import NGRAM
from vllm_lite import LLM, SamplingParams
from vllm_lite.config import demo_folder
from vllm_lite.protocol.structured import StructuredOutputsParams
from vllm_lite.structured.compile import compile_grammar

PATTERN = r"(red|rest|great) (ox|owls|cats)"
PROMPT = "Once upon a time there was a"
TEMPERATURE = 2.0
"""A high temperature, so that many of the texts occur, in several tokenizations each."""
LEAST = 1e-6
"""Minimum probability of a path that is followed."""
FEW = 5.0
"""Texts with a smaller expected count are counted together."""
SIGNIFICANT = 1e-3
ENDS = (1, 4)
ENGINES: dict[str, dict[str, Any]] = {
    "without drafts": {"jump_forward": False},
    "jump-forward": {},
    "jump-forward and n-gram": NGRAM,
}


class Odds:
    """The probability of every text of PATTERN, by transformers' logits."""

    def __init__(self) -> None:
        with open(f"{demo_folder()}/tokenizer.json") as file:
            self.tokenizer = LLTokenizer(file.read(), eos_token=list(ENDS))
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(demo_folder(), dtype="float32").eval()
        self.matcher = LLMatcher(self.tokenizer, compile_grammar(StructuredOutputsParams(regex=PATTERN)))
        self.found: defaultdict[str, float] = defaultdict(float)
        self.paths = 0

    def compute(self, prompt: list[int]) -> dict[str, float]:
        """Follow every path after `prompt`, with all paths of one length in one pass of the model."""
        paths: list[tuple[list[int], float]] = [([], 1.0)]
        while paths:
            tokens = torch.tensor([prompt + path for path, _ in paths])
            with torch.inference_mode():
                logits = self.model(tokens).logits[:, -1].double() / TEMPERATURE
            paths = [
                longer for (path, p), row in zip(paths, logits, strict=True) for longer in self._go_on(path, p, row)
            ]
        return dict(self.found)

    def _go_on(self, path: list[int], p: float, logits: torch.Tensor) -> list[tuple[list[int], float]]:
        matcher = self.matcher.deep_copy()
        matcher.consume_tokens(path)
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = torch.from_numpy(np.flatnonzero(bits))
        longer = []
        for token, share in zip(allowed.tolist(), logits[allowed].softmax(0).tolist(), strict=True):
            if token in ENDS:
                self.found[self.tokenizer.decode_str(path)] += p * share
                self.paths += 1
            elif p * share > LEAST:
                longer.append(([*path, token], p * share))
        return longer


def p_value(expected: dict[str, float], counts: Counter[str]) -> tuple[float, int]:
    """The p-value of the chi-square test that `counts` are draws from `expected`, and its degrees of freedom."""
    draws = counts.total()
    often = {text: p * draws for text, p in expected.items() if p * draws >= FEW}
    rest = draws - sum(often.values()), draws - sum(counts[text] for text in often)
    pairs = [(most, counts[text]) for text, most in often.items()] + ([rest] if rest[0] >= FEW else [])
    chi_square = sum((got - wanted) ** 2 / wanted for wanted, got in pairs)
    freedom = len(pairs) - 1
    half = torch.tensor([freedom / 2, chi_square / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1])), freedom


def draw(settings: dict[str, Any], num_draws: int) -> tuple[list[str], list[int], float]:
    """Texts for `num_draws` seeds, the prompt's tokens, and the accepted drafts of each draw."""
    params = [
        SamplingParams(
            structured_outputs=StructuredOutputsParams(regex=PATTERN), temperature=TEMPERATURE, seed=seed, max_tokens=60
        )
        for seed in range(num_draws)
    ]
    base: dict[str, Any] = {"dtype": "float32", "cpu_threads": 1, "log_level": "error", "max_num_seqs": 32}
    with LLM(**base, **settings) as llm:
        outputs = llm.generate([PROMPT] * num_draws, params, use_tqdm=False)
        accepted = llm.stats().accepted_tokens
    return [output.outputs[0].text for output in outputs], outputs[0].prompt_token_ids, accepted / num_draws


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=4000)
    args = parser.parse_args()
    expected: dict[str, float] = {}
    first: list[str] = []
    wrong = 0
    for name, settings in ENGINES.items():
        texts, prompt, accepted = draw(settings, args.draws)
        if not first:
            odds = Odds()
            first, expected = texts, odds.compute(prompt)
            print(f"{len(expected)} texts over {odds.paths} paths, together {sum(expected.values()):.6f}")
        p, freedom = p_value(expected, Counter(texts))
        different = sum(one != other for one, other in zip(first, texts, strict=True))
        wrong += (p < SIGNIFICANT) + (different > 0)
        print(
            f"{name:24} p = {p:.3f} ({freedom} degrees), {different} different, {accepted:.2f} accepted drafts a draw"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
