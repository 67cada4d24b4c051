"""The bundled model writes texts of its grammar: the checker accepts samples of the shipped weights by transformers."""

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tests.driver import Driver, new_request
from vllm_lite.config import demo_folder
from vllm_lite.protocol.step import Draft

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "demo_model"))
import train as demo  # noqa: E402 - found only once the example is on the path
import train_head  # noqa: E402 - as above
from grammar import ASSISTANT, BOS, END, USER, check_text  # noqa: E402

MODEL = Path(demo_folder())
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


def test_the_chat_template_writes_the_format_of_the_training(hf_tokenizer):
    messages = [
        {"role": "system", "content": "You are ignored."},
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hello! 👋"},
        {"role": "user", "content": "Tell me a story."},
    ]
    text = hf_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == f"{BOS}{USER}Hello!{END}{ASSISTANT}Hello! 👋{END}{USER}Tell me a story.{END}{ASSISTANT}"


def test_training_learns_and_saves(tokenizer, tmp_path):
    """A few steps of the real loop: the loss falls, and the saved model can be loaded."""
    options = demo.Options(tmp_path, 9, 1, 1, batch_tokens=256, learning_rate=4e-3, save_every=0, autocast=False)
    torch.manual_seed(0)
    model = demo.build_model(tokenizer)
    before = demo.held_out_loss(model, tokenizer, 1, num_blocks=2)
    demo.train(model, tokenizer, options)
    demo.save_model(model, tmp_path)
    saved = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    assert demo.held_out_loss(saved, tokenizer, 1, num_blocks=2) < before - 0.5


def test_a_head_learns_and_drafts(tokenizer, model, tmp_path):
    """The engine makes the drafts that it learned to make."""
    folder = tmp_path / "demo"
    shutil.copytree(MODEL, folder)
    head, frozen = train_head.Head(model), model.requires_grad_(False)
    args = argparse.Namespace(
        model=folder, steps=3, seed=1, batch_tokens=512, learning_rate=4e-3, save_every=0, autocast=False
    )
    ids = demo.Blocks(tokenizer, 5).take(1, 40)[:, :-1]
    before = train_head.loss_of(frozen, head, ids).item()
    train_head.train(frozen, head, tokenizer, args)
    assert train_head.loss_of(frozen, head, ids).item() < before
    train_head.save(head, folder)
    found, given = load_file(folder / "model.safetensors"), load_file(MODEL / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in given.items())
    assert len(found) - len(given) == len(head.state_dict())

    drafts: Any = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
    driver, prompt = Driver(folder, max_model_len=256, **drafts), ids[0].tolist()
    drafter: Any = driver.drafts.drafter
    made, seen = drafter.before, list[Any]()

    def watched(batch):
        seen.append(made(batch))
        return seen[-1]

    drafter.before = watched
    driver.run(new_request(0, prompt, [1, 2, 3, 4]))
    driver.run(Draft(0, 1, []))
    head.load_state_dict({name: tensor.bfloat16().float() for name, tensor in head.state_dict().items()})
    with torch.inference_mode():
        ((logits, _), *_) = train_head.places_of(frozen, head, torch.tensor([[*prompt, driver.got[0][0]]]))
    assert seen[0][0].tolist() == [int(logits[0, -1].argmax())]
