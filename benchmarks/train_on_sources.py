"""Train a Llama of 25 million parameters on the sources of Python's standard library: a model with something to lose.

    python benchmarks/train_on_sources.py OUT [--steps 600]     # some ten minutes on two cores
    python benchmarks/quantization_quality.py --model OUT --text OUT/held_out.txt

Random weights say little about the cost of quantization, because their outputs depend on all inputs equally, and the
demo model is very small. The text is on every machine with Python; a twentieth of the files is held out.
"""

import argparse
import random
import sysconfig
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 8192
LENGTH = 256  # tokens of a training text
BATCH = 16
PEAK_RATE = 1.5e-3
WARM_UP = 40  # steps
BOS, EOS = "<s>", "</s>"


def source_texts() -> tuple[list[str], list[str]]:
    """The library's modules, shuffled alike on every machine: to train on, and held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    texts = [file.read_text(errors="ignore") for file in files if "site-packages" not in file.parts]
    texts = [text for text in texts if len(text) > 500]
    random.Random(1).shuffle(texts)
    held_out = len(texts) // 20
    return texts[held_out:], texts[:held_out]


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[BOS, EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def new_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def rate_at(step: int, steps: int) -> float:
    """Linear up, then linear down to a twentieth."""
    if step < WARM_UP:
        return PEAK_RATE * (step + 1) / WARM_UP
    return PEAK_RATE * max(0.05, (steps - step) / (steps - WARM_UP))


def train(model: LlamaForCausalLM, tokens: torch.Tensor, steps: int) -> float:
    """tokens: int64 [n], all texts in a row. Returns the mean loss of the last 50 steps, in nats."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(2)
    losses: list[float] = []
    began = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, steps)
        starts = torch.randint(len(tokens) - LENGTH - 1, (BATCH,), generator=generator)
        batch = torch.stack([tokens[start : start + LENGTH + 1] for start in starts.tolist()])
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch[:, :-1]).logits
        loss = functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 19:
            mean = sum(losses[-20:]) / 20
            print(f"step {step + 1} of {steps}: loss {mean:.3f}, {time.monotonic() - began:.0f} s", flush=True)
    return sum(losses[-50:]) / len(losses[-50:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    texts, held_out = source_texts()
    tokenizer = train_tokenizer(texts)
    tokens = torch.tensor([token for encoding in tokenizer.encode_batch(texts) for token in [0, *encoding.ids]])
    model = new_model()
    num_parameters = sum(weight.numel() for weight in model.parameters())
    print(f"{len(tokens):,} tokens, {num_parameters:,} parameters", flush=True)
    loss = train(model, tokens, args.steps)
    model.bfloat16().save_pretrained(args.out)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS).save_pretrained(args.out)
    (args.out / "held_out.txt").write_text("\n\n".join(held_out))
    print(f"loss {loss:.3f} nats a token over the last steps; written to {args.out}")


if __name__ == "__main__":
    main()
