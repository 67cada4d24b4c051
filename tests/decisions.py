"""Checkpoints that answer in labels, and the expected probabilities of answers, by transformers."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from tests.checkpoints import make_checkpoint, trained_tokenizer, transformers_model
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.client.decisions.questions import Question
from vllm_lite.client.decisions.shared import REPLY

TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}\n{{ message.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
QUESTIONS: dict[str, dict[str, Any]] = {
    "team": {
        "type": "choice",
        "instructions": "Which team?",
        "criteria": {"billing": "payments and refunds", "shipping": None, "a name of many tokens": "else"},
    },
    "urgent": {"type": "noul", "instructions": "Is it urgent?", "criteria": {"true": "money is moving"}},
    "tone": {"type": "score", "instructions": "How upset?", "criteria": ["calm", "annoyed", "furious"]},
}
STATE = {"ticket": "The quick brown fox was charged twice, and the dog does not mind. 猫"}


def write_decider(path: Path, family: str = "llama", *, template: str | None = TEMPLATE, **overrides: Any) -> Path:
    """Write a tiny random checkpoint whose vocabulary has yes and no, and whose chats have turns."""
    return as_decider(make_checkpoint(path, family, **overrides), template)


def as_decider(path: Path, template: str | None = TEMPLATE) -> Path:
    """Give the checkpoint in the folder `path` such a vocabulary, and this template."""
    letters = [chr(letter) for letter in range(ord("A"), ord("Z") + 1)]
    words = ["yes", "no", "Yes", "No", " yes", " no", " Yes", " No", *(f" {each}" for each in [*letters, *range(10)])]
    tokenizer = trained_tokenizer([each for word in words for each in [f"x{word}", word] * 50])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings.pop("chat_template")
    settings |= {} if template is None else {"chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


class Expected(NamedTuple):
    """Probabilities of a question's options, and of all its labels together among all tokens."""

    probabilities: list[float]
    label_mass: float


class Oracle:
    """A checkpoint in transformers, asked one question after the other, each by a prompt of its own."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = transformers_model(path, load_spec(path).architecture).eval()

    def prompt(self, state: str, question: Question, instructions: str = "") -> list[int]:
        said = {"role": "user", "content": f"{REPLY}\n\n{state}\n\n{question.text}"}
        messages = [*([{"role": "system", "content": instructions}] if instructions else []), said]
        ids: Any = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return list(ids)

    def ask(self, state: str, question: Question, instructions: str = "") -> Expected:
        import torch

        prompt = self.prompt(state, question, instructions)
        with torch.inference_mode():
            row = self.model(torch.tensor([prompt])).logits[0, -1].double().log_softmax(-1)
        vocabulary = self.tokenizer.get_vocab()
        masses = [sum(math.exp(row[vocabulary[each]]) for each in label) for label in question.labels]
        return Expected([mass / sum(masses) for mass in masses], sum(masses))


def probabilities_of(answer: Any) -> list[float]:
    """The probabilities of an answer, in the order of its options."""
    return list(answer.probabilities.values())
