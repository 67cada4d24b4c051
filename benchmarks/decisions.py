"""Time of a decision with 64 questions over one state, relative to the prefill of the state alone.

    python benchmarks/decisions.py [--model MODEL] [--state 4000] [--questions 64] [--rounds 7]

MODEL is a folder or GGUF file with a tokenizer, whose questions go through `LLM.decide`; or random-100m or random-500m,
with questions of `--own` random tokens after the same state. Each round measures, with an empty prefix cache: the state
alone; a single prompt with as many tokens as a decision computes; the decision. Fourth, it repeats the decision with a
cached state. It prints the medians of the rounds' ratios to the state alone, and the worst ratio of the first
decisions. The tokens of the questions must be computed by any engine: 64 questions of 19 tokens are 1,216, almost a
third of the state. `tokens` is this lower bound, `same_tokens` the ratio of the single prompt.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

from vllm_lite import LLM, SamplingParams
from vllm_lite.client.prompt import TokensPrompt
from vllm_lite.tools.bench.models import RANDOM_MODELS, write_config

SENTENCE = "The parcel {} was sent on a rainy day to a customer in the north, who paid by card and waited for it. "
LABELS = [100, 200]
MAX_TOKENS = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


class Texts:
    """Questions in words, through LLM.decide."""

    def __init__(self, llm: LLM, num_tokens: int, num_questions: int, question: str) -> None:
        self._llm = llm
        tokenizer = llm.get_tokenizer()
        text = "".join(SENTENCE.format(number) for number in range(num_tokens))
        self.state = tokenizer.decode(tokenizer.encode(text)[:num_tokens])
        self.ids = tokenizer.encode(self.state)
        self._questions = {
            f"q{number}": {"type": "noul", "instructions": question.format(number)} for number in range(num_questions)
        }

    def decide(self) -> int:
        """Make a decision. Returns the number of computed tokens."""
        found = self._llm.decide(self.state, self._questions)
        return found.num_prompt_tokens - found.num_cached_tokens


class Ids:
    """Questions in random tokens, for models that have no words."""

    def __init__(self, llm: LLM, num_tokens: int, num_questions: int, num_own: int) -> None:
        self._llm = llm
        draw = random.Random(0)
        self.ids = [draw.randrange(3, 30000) for _ in range(num_tokens)]
        self._prompts = [
            TokensPrompt(
                prompt_token_ids=[*self.ids, *(draw.randrange(3, 30000) for _ in range(num_own))], marks=[num_tokens]
            )
            for _ in range(num_questions)
        ]
        self._params = MAX_TOKENS.clone(logprob_token_ids=LABELS, detokenize=False)

    def decide(self) -> int:
        """Make a decision as Texts does. The first prompt is sent alone, as in a decision."""
        outputs = self._llm.generate(self._prompts[:1], self._params, use_tqdm=False)
        outputs += self._llm.generate(self._prompts[1:], self._params, use_tqdm=False)
        return sum(len(output.prompt_token_ids) - (output.num_cached_tokens or 0) for output in outputs)


def timed(work: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def measure(llm: LLM, asked: Texts | Ids, num_rounds: int) -> dict[str, Any]:
    """Ratios to the prefill of the state alone, round by round."""
    draw = random.Random(1)
    llm.reset_prefix_cache()
    num_computed = asked.decide()
    more = [draw.randrange(3, 1000) for _ in range(num_computed - len(asked.ids))]
    rounds = []
    for _ in range(num_rounds):
        llm.reset_prefix_cache()
        state_s = timed(lambda: llm.generate([asked.ids], MAX_TOKENS, use_tqdm=False))
        llm.reset_prefix_cache()
        same_s = timed(lambda: llm.generate([[*asked.ids, *more]], MAX_TOKENS, use_tqdm=False))
        llm.reset_prefix_cache()
        decide_s = timed(asked.decide)
        again_s = timed(asked.decide)
        rounds.append({"state_s": state_s, "same_tokens": same_s, "decision": decide_s, "again": again_s})
    found: dict[str, Any] = {
        name: round(statistics.median(each[name] / each["state_s"] for each in rounds), 3)
        for name in ("same_tokens", "decision", "again")
    }
    worst = max(each["decision"] / each["state_s"] for each in rounds)
    state_s = statistics.median(each["state_s"] for each in rounds)
    counts = {"state_tokens": len(asked.ids), "computed_tokens": num_computed}
    floor = round(num_computed / len(asked.ids), 3)
    return {**counts, "tokens": floor, **found, "worst": round(worst, 3), "state_s": round(state_s, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random-100m")
    parser.add_argument("--state", type=int, default=4000, help="tokens of the state")
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--question", default="Is parcel {} late?", help="the words of each, {} is its number")
    parser.add_argument("--own", type=int, default=4, help="tokens of each question of a random model")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    settings: dict[str, Any] = {"max_model_len": args.state * 2 + 1024, "log_level": "error", "deterministic": True}
    with tempfile.TemporaryDirectory() as folder:
        is_random = args.model in RANDOM_MODELS
        if is_random:
            write_config(args.model, folder)
            settings |= {"load_format": "dummy", "hf_overrides": {"max_position_embeddings": 16384}}
        with LLM(folder if is_random else args.model, **settings) as llm:
            asked: Texts | Ids
            if is_random:
                asked = Ids(llm, args.state, args.questions, args.own)
            else:
                asked = Texts(llm, args.state, args.questions, args.question)
            print(json.dumps({"model": args.model, "questions": args.questions, **measure(llm, asked, args.rounds)}))


if __name__ == "__main__":
    main()
