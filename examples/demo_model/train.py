"""Train the demo model that ships with the package, from text that `grammar.py` writes.

    python examples/demo_model/train.py            # writes vllm_lite/demo_model/, under 25 minutes on one core

Nothing is downloaded. The text is generated while training runs and never repeats. The result is an ordinary Hugging
Face checkpoint (Llama architecture, bf16 safetensors) with a byte-level BPE tokenizer and a chat template. At the end
the saved checkpoint is read back, and its held-out loss and the share of sampled sentences that the grammar accepts are
printed.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from grammar import (
    ASSISTANT,
    BOS,
    END,
    EOS,
    SPECIAL_TOKENS,
    USER,
    check_text,
    write_document,
    write_exchange,
    write_plain,
)
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional
from tqdm import tqdm
from transformers import DynamicCache, GenerationConfig, LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 2048
MAX_POSITIONS = 2048
HELD_OUT_SEED = 10**9  # far from every training seed
DEFAULT_OUT = Path(__file__).resolve().parents[2] / "vllm_lite" / "demo_model"

# A system message is left out: the model has seen none and is too small to obey one.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<|user|>' + message['content'] | trim + '<|end|>' }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>' + message['content'] | trim + '<|end|>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True)
class Options:
    """Choices of the command line."""

    out: Path
    steps: int
    seed: int
    threads: int
    batch_tokens: int
    learning_rate: float
    save_every: int
    autocast: bool


# ---- tokenizer -------------------------------------------------------------------------------------------------------


def train_tokenizer(seed: int, num_documents: int = 20_000) -> Tokenizer:
    """Byte-level BPE over generated text.

    Accented letters and emoji are kept out of the merges on purpose: they stay split into single bytes, so that the
    demo exercises characters whose bytes arrive in different tokens.
    """
    rng = random.Random(seed)

    def corpus() -> Iterator[str]:
        for _ in range(num_documents):
            text = write_plain(rng) if rng.random() < 0.5 else " ".join(write_exchange(rng))
            yield "".join(char if char.isascii() or char in "“”" else "\n" for char in text)

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bos)]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    """Write the files by hand, in the form that every version of transformers reads."""
    roles = [USER, ASSISTANT, END]
    special = {"bos_token": BOS, "eos_token": EOS, "pad_token": EOS, "additional_special_tokens": roles}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
    }
    tokenizer.save(str(out / "tokenizer.json"))
    for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", special)):
        (out / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# ---- model and data --------------------------------------------------------------------------------------------------


def build_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """A Llama with grouped-query attention: 8 query heads share 2 KV heads."""
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.03,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(EOS),
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=[tokenizer.token_to_id(EOS), tokenizer.token_to_id(END)],
        pad_token_id=tokenizer.token_to_id(EOS),
    )
    return model


class Blocks:
    """An endless stream of token blocks, packed from documents one after another."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer = tokenizer
        self.rng = random.Random(seed)
        self.rest: list[int] = []

    def take(self, num_blocks: int, length: int) -> torch.Tensor:  # -> [num_blocks, length + 1]
        """The next blocks; each carries one token more than it trains on, for the shifted targets."""
        wanted = num_blocks * (length + 1)
        while len(self.rest) < wanted:
            documents = [write_document(self.rng) for _ in range(32)]
            for encoding in self.tokenizer.encode_batch(documents, add_special_tokens=False):
                self.rest += encoding.ids
        ids, self.rest = self.rest[:wanted], self.rest[wanted:]
        return torch.tensor(ids).view(num_blocks, length + 1)


def loss_of(model: LlamaForCausalLM, blocks: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats per token. blocks: [num_blocks, length + 1]"""
    logits = model(input_ids=blocks[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), blocks[:, 1:].flatten())


# ---- training --------------------------------------------------------------------------------------------------------


def block_length(step: int, steps: int) -> int:
    """Short blocks in the first half, then longer ones and every eighth step one as long as the model's context."""
    if step < 0.5 * steps:
        return 256
    return MAX_POSITIONS if step % 8 == 0 else 512


def learning_rate(step: int, options: Options) -> float:
    """Linear warm-up over 3 % of the steps, then a cosine down to 2 % of the peak."""
    warmup = max(1, int(0.03 * options.steps))
    if step < warmup:
        return options.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, options.steps - warmup)
    return options.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def make_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms.

    Muon matters here: what is hard to learn is not the sentences but to copy the right name or thing into them from
    far back, and it gets there with about half the text that AdamW alone needs.
    """
    layer_matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    rest = [model.model.embed_tokens.weight, *(p for p in model.parameters() if p.dim() == 1)]
    return [
        torch.optim.Muon(layer_matrices, lr=0.0, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=0.0, weight_decay=0.0, betas=(0.9, 0.98), fused=True),
    ]


def train(model: LlamaForCausalLM, tokenizer: Tokenizer, options: Options) -> float:
    """Train float32 weights; returns the mean loss of the last 50 steps."""
    data = Blocks(tokenizer, options.seed)
    optimizers = make_optimizers(model)
    recent: list[float] = []
    model.train()
    progress = tqdm(range(options.steps), desc="training", unit="step", mininterval=5)
    for step in progress:
        length = block_length(step, options.steps)
        for group in itertools.chain.from_iterable(optimizer.param_groups for optimizer in optimizers):
            group["lr"] = learning_rate(step, options)
        with torch.autocast("cpu", torch.bfloat16, enabled=options.autocast):
            loss = loss_of(model, data.take(max(1, options.batch_tokens // length), length))
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        recent = [*recent[-49:], loss.item()]
        progress.set_postfix(loss=f"{recent[-1]:.3f}", refresh=False)
        if (step + 1) % 50 == 0:
            tqdm.write(f"step {step + 1:5d}  block {length:4d}  loss {sum(recent) / len(recent):.4f}")
        if options.save_every and (step + 1) % options.save_every == 0:
            save_model(model, options.out)
    return sum(recent) / len(recent)


def save_model(model: LlamaForCausalLM, out: Path) -> None:
    """Write config.json, generation_config.json and the weights rounded to bf16."""
    copy.deepcopy(model).bfloat16().save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # safetensors writes 0600, which a package must not ship


# ---- measuring -------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def held_out_loss(model: LlamaForCausalLM, tokenizer: Tokenizer, num_batches: int = 8, num_blocks: int = 16) -> float:
    """Loss on text from a seed that training never uses."""
    data = Blocks(tokenizer, HELD_OUT_SEED)
    return sum(loss_of(model, data.take(num_blocks, 512)).item() for _ in range(num_batches)) / num_batches


def sample_prompts(count: int, seed: int) -> list[str]:
    """Beginnings as a user of the demo would type them, half of them as chats; each starts with BOS."""
    rng = random.Random(seed)
    plain = ["Once upon a time", "There once was", "How to make tea:", "Hello, my name is", "This is the story of", ""]
    prompts = []
    for number in range(count):
        if number % 2:
            prompts.append(f"{BOS}{USER}{write_exchange(rng)[0]}{END}{ASSISTANT}")
        else:
            prompts.append(BOS + plain[number // 2 % len(plain)])
    return prompts


@torch.inference_mode()
def sample_texts(
    model: LlamaForCausalLM, tokenizer: Tokenizer, prompts: list[str], num_tokens: int, temperature: float
) -> list[str]:
    """Continue each prompt by ``num_tokens`` tokens, past any EOS, in one left-padded batch. 0 is greedy."""
    rows = [encoding.ids for encoding in tokenizer.encode_batch(prompts, add_special_tokens=False)]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])  # [num_prompts, width]
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    cache, step_ids = DynamicCache(config=model.config), ids
    for _ in range(num_tokens):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -step_ids.shape[1] :]
        logits = model(
            input_ids=step_ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        ).logits[:, -1]
        if temperature > 0:
            step_ids = torch.multinomial(torch.softmax(logits.float() / temperature, -1), 1)
        else:
            step_ids = logits.argmax(-1, keepdim=True)
        ids = torch.cat([ids, step_ids], dim=1)
        mask = torch.cat([mask, torch.ones_like(step_ids)], dim=1)
    return [
        tokenizer.decode(all_ids[width - len(row) :], skip_special_tokens=False)
        for row, all_ids in zip(rows, ids.tolist(), strict=True)
    ]


def acceptance(model: LlamaForCausalLM, tokenizer: Tokenizer, temperature: float, num_tokens: int) -> tuple[int, int]:
    """Accepted and all complete sentences in 48 continuations."""
    prompts = sample_prompts(48, seed=7)
    texts = sample_texts(model, tokenizer, prompts, num_tokens, temperature)
    results = [check_text(text) for text in texts]
    return sum(accepted for accepted, _ in results), sum(total for _, total in results)


def report(tokenizer: Tokenizer, options: Options, train_loss: float, minutes: float) -> list[str]:
    """Read the saved checkpoint back and measure it: what is printed is what ships."""
    model = LlamaForCausalLM.from_pretrained(options.out, dtype=torch.float32).eval()
    size_bytes = sum(path.stat().st_size for path in options.out.iterdir())
    torch.manual_seed(options.seed)
    loss = held_out_loss(model, tokenizer)
    lines = [
        f"parameters: {sum(p.numel() for p in model.parameters()):,}; vocabulary: {tokenizer.get_vocab_size()}",
        f"training: {options.steps} steps, {minutes:.1f} minutes, threads: {options.threads}",
        f"loss in nats per token: train {train_loss:.4f} (last 50 steps), held out {loss:.4f}",
    ]
    for temperature, num_tokens in ((0.0, 200), (0.8, 200), (1.0, 200), (1.0, 400)):
        accepted, total = acceptance(model, tokenizer, temperature, num_tokens)
        share = 100 * accepted / max(1, total)
        lines.append(
            f"sentences accepted at temperature {temperature}, {num_tokens} tokens each: "
            f"{accepted} of {total} ({share:.1f} %)"
        )
    return [*lines, f"folder: {size_bytes / 1e6:.2f} MB"]


README = """# The demo model

A very small Llama (grouped-query attention, bf16) that tells small stories, explains simple how-tos and answers a few
questions, so that everything can be tried without downloading anything. It knows nothing else: it learned from text
that `examples/demo_model/train.py` generates from its own grammar, and that script reproduces it.

Byte-level BPE; BOS is added by the tokenizer; accented letters and emoji are split into bytes on purpose. The chat
template is `<|user|>...<|end|><|assistant|>...<|end|>`; system messages are ignored. Licence: Apache-2.0.

Figures printed by the script:

"""


def parse_options() -> Options:
    """Read the command line; the defaults reproduce the shipped checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--out", type=Path, default=DEFAULT_OUT, help="folder for the checkpoint")
    add("--steps", type=int, default=2500, help="optimizer steps")
    add("--seed", type=int, default=1, help="seed of weights, text and samples")
    add("--threads", type=int, default=1, help="torch threads; the result depends on their number in its last bits")
    add("--batch-tokens", type=int, default=2048, help="tokens a step")
    add("--learning-rate", type=float, default=4e-3, help="peak learning rate")
    add("--save-every", type=int, default=0, help="save after every so many steps too; 0: only at the end")
    add(
        "--autocast",
        action=argparse.BooleanOptionalAction,
        default=torch.ops.mkldnn._is_mkldnn_bf16_supported(),  # noqa: SLF001 - there is no public way to ask
        help="matrix products in bf16; default: where the CPU has instructions for it",
    )
    return Options(**vars(parser.parse_args()))


def main() -> None:
    """Train, save, read back, measure."""
    options = parse_options()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    torch.use_deterministic_algorithms(True, warn_only=True)
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    tokenizer = train_tokenizer(options.seed)
    save_tokenizer(tokenizer, options.out)
    model = build_model(tokenizer)
    print(
        f"vocabulary {tokenizer.get_vocab_size()}, {sum(p.numel() for p in model.parameters()):,} parameters",
        flush=True,
    )
    train_loss = train(model, tokenizer, options)
    save_model(model, options.out)
    lines = report(tokenizer, options, train_loss, (time.perf_counter() - start) / 60)
    print("\n".join(lines))
    (options.out / "README.md").write_text(README + "\n".join(f"- {line}" for line in lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
