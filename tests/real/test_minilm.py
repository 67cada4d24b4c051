"""all-MiniLM-L6-v2: vectors compared with transformers', pooled by the formula of sentence-transformers' modules."""

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch

from tests.e2e.reference import start

TEXTS = (
    "The capital of France is Paris.",
    "Paris is where the French government sits.",
    "How do I sort a list in Python?",
    "Schnee lag auf den Dächern. 🙂",
    "x",
    "words and more words " * 40,
)


@torch.inference_mode()
def vectors_of_transformers(folder: Path, text: str) -> torch.Tensor:  # float32 [384]
    from transformers import AutoModel, AutoTokenizer

    pooling = json.loads((folder / "1_Pooling" / "config.json").read_text())
    assert pooling["pooling_mode_mean_tokens"]
    modules = [each["type"].rpartition(".")[2] for each in json.loads((folder / "modules.json").read_text())]
    assert modules == ["Transformer", "Pooling", "Normalize"]
    length = json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=length)
    hidden = model(**inputs).last_hidden_state[0]  # [num_tokens, 384]
    return torch.nn.functional.normalize(hidden.mean(dim=0), dim=0)


def test_vectors_match_sentence_transformers(real: Callable[[str], Path]) -> None:
    folder = real("minilm")
    with closing(start(folder, dtype="float32")) as llm:
        outputs = llm.embed(list(TEXTS), use_tqdm=False)
    vectors = [torch.tensor(output.outputs.embedding) for output in outputs]
    for text, vector in zip(TEXTS, vectors, strict=True):
        assert (vector - vectors_of_transformers(folder, text)).abs().max() < 1e-5, text
    assert vectors[0] @ vectors[1] > 0.4 + vectors[0] @ vectors[2]
