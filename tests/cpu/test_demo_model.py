"""The bundled model speaks its grammar: the checker accepts what transformers samples from the shipped weights."""

import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "demo_model"))
import train as demo  # noqa: E402 - found only once the example is on the path
from grammar import ASSISTANT, BOS, END, USER, check_text  # noqa: E402

MODEL = ROOT / "vllm_lite" / "demo_model"
PLAIN = ["Once upon a time", "How to make tea:", "Hello, my name is", "There once was", "The capital of France is"]
CHATS = [
    "Tell me a story about a fox.",
    "How do I make tea?",
    "Hello!",
    "What is the capital of France?",
    "Tell me a joke.",
]
PROMPTS = [BOS + text for text in PLAIN] + [f"{BOS}{USER}{text}{END}{ASSISTANT}" for text in CHATS]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def model():
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def hf_tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


@pytest.mark.parametrize("temperature", [0.8, 1.0])
def test_sampled_sentences_are_accepted(model, tokenizer, temperature):
    torch.manual_seed(0)
    texts = demo.sample_texts(model, tokenizer, PROMPTS * 2, num_tokens=80, temperature=temperature)
    accepted, total = (sum(counts) for counts in zip(*map(check_text, texts), strict=True))
    assert total >= 100
    assert accepted / total >= 0.9, texts


def test_chat_answers_make_sense(model, tokenizer):
    texts = demo.sample_texts(model, tokenizer, PROMPTS[len(PLAIN) :], num_tokens=48, temperature=0)
    answers = [text.split(ASSISTANT)[1].split(END)[0] for text in texts]
    assert " fox " in answers[0]
    assert answers[1].startswith(("How to make tea:\n", "Here is how to make tea:\n"))
    assert answers[3] == "The capital of France is Paris."


def test_transformers_reads_the_same_tokens(tokenizer, hf_tokenizer):
    for text in ("Once upon a time", "Zoë met Łukasz at the café. 🦊", "  two  spaces", ""):
        assert hf_tokenizer(text)["input_ids"] == tokenizer.encode(text).ids
        assert hf_tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_the_chat_template_writes_what_training_showed(hf_tokenizer):
    messages = [
        {"role": "system", "content": "You are ignored."},
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hello! 👋"},
        {"role": "user", "content": "Tell me a story."},
    ]
    text = hf_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == f"{BOS}{USER}Hello!{END}{ASSISTANT}Hello! 👋{END}{USER}Tell me a story.{END}{ASSISTANT}"


def test_training_learns_and_saves(tokenizer, tmp_path):
    """A few steps of the real loop: the loss falls, and what is saved loads again."""
    options = demo.Options(tmp_path, 9, 1, 1, batch_tokens=256, learning_rate=4e-3, save_every=0, autocast=False)
    torch.manual_seed(0)
    model = demo.build_model(tokenizer)
    before = demo.held_out_loss(model, tokenizer, num_batches=1)
    demo.train(model, tokenizer, options)
    demo.save_model(model, tmp_path)
    saved = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    assert demo.held_out_loss(saved, tokenizer, num_batches=1) < before - 0.5
