"""Answers of transformers for Gemma 3 270M, which tests/real/test_gemma3.py compares: its reader takes a quarter of a
minute for the file, and says the same each time.

    python -m tests.real.record_gemma3
"""

import json
from pathlib import Path

import torch

from tests.real.cache import folder_of
from tests.real.models import NUM_TOKENS, PAGE, PROMPTS, GgufOracle

FILE = "gemma-3-270m-q4_k_m.gguf"
RECORDED = Path(__file__).with_name("gemma3.json")
TEXTS = (*PROMPTS, "", " ", "\n\n  x", "1234567", "don't", "ﬁ é", "<start_of_turn>user")


def main() -> None:
    folder = folder_of("gemma3-270m")
    assert folder is not None, "`make real` fetches it"
    oracle = GgufOracle(folder / FILE)
    page = oracle.tokenizer(PAGE)["input_ids"]
    likely = oracle.logits(page).log_softmax(dim=-1)[:-1].gather(1, torch.tensor(page[1:])[:, None])[:, 0]
    continuations = [continuation(oracle, oracle.tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]
    found = {
        "page": page,
        "page_logprobs": [round(float(each), 5) for each in likely],
        "continuations": continuations,
        "tokens": {text: oracle.tokenizer(text)["input_ids"] for text in TEXTS},
    }
    RECORDED.write_text(json.dumps(found, ensure_ascii=False) + "\n")


def continuation(oracle: GgufOracle, tokens: list[int]) -> list[tuple[int, float]]:
    """Greedy tokens behind a prompt, each with how far its logit is above the second."""
    ids = torch.tensor([tokens])
    settings = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True, "eos_token_id": None}
    done = oracle.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, **settings)
    best = torch.cat(done.logits).topk(2)
    margins = (best.values[:, 0] - best.values[:, 1]).tolist()
    return [(int(token), round(margin, 5)) for token, margin in zip(best.indices[:, 0], margins, strict=True)]


if __name__ == "__main__":
    main()
