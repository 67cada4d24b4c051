"""Train a head for the demo model that predicts further tokens, so that the model drafts for itself.

    python examples/demo_model/train_head.py --model FOLDER     # adds it to a copy of vllm_lite/demo_model
    vllm-lite serve FOLDER --speculative-config '{"method": "mtp", "num_speculative_tokens": 4}'

The head is one more layer (docs/speculation.md, "MTP heads"): it reads the vector of a token and the model's hidden
state of the one before, and its output stands for the hidden state in the prediction of the next. It learns what the
model itself says, not what the text does: a draft is right if it is the model's own token. The model stays as it is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional
from tqdm import tqdm
from train import HELD_OUT_SEED, Blocks
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

PLACES = 4
"""Number of drafts per step for which the head is trained, each made from the head's output for the previous one."""
FADING = 0.8
"""Weight of a draft's loss relative to the previous draft's: a draft is useful only after right ones."""
BLOCK = 256
PREFIX = "mtp."


class Head(nn.Module):
    """y = norm(layer(fc([norm(embedding of the token), norm(hidden state before it)])))."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        size, eps = model.config.hidden_size, model.config.rms_norm_eps
        self.pre_fc_norm_embedding = LlamaRMSNorm(size, eps)
        self.pre_fc_norm_hidden = LlamaRMSNorm(size, eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([LlamaDecoderLayer(model.config, 0)])
        self.norm = LlamaRMSNorm(size, eps)
        self.layers[0].load_state_dict(model.model.layers[-1].state_dict())
        nn.init.normal_(self.fc.weight, std=size**-0.5)

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        """embedded, hidden: [num_blocks, length, hidden_size], and so is the result."""
        joined = torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)), -1)
        y = self.layers[0](self.fc(joined), **given)
        out: torch.Tensor = self.norm(y[0] if isinstance(y, tuple) else y)
        return out


def places_of(model: LlamaForCausalLM, head: Head, ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The head's logits and the model's at each place where both predict the same token: [num_blocks, n, vocab].

    ids: [num_blocks, length]. Place j drafts the token behind j + 1 further ones, from their true vectors.
    """
    with torch.no_grad():
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        wanted = model.lm_head(hidden)
        embedded = model.model.embed_tokens(ids)
    found = []
    for place in range(1, PLACES + 1):
        length = ids.shape[1] - place
        positions = torch.arange(place, ids.shape[1])[None]
        given = {"position_embeddings": model.model.rotary_emb(embedded, positions), "position_ids": positions}
        mask = torch.full((length, length), -torch.inf, dtype=embedded.dtype).triu(1)[None, None]
        hidden = head(embedded[:, place:], hidden[:, :-1], given | {"attention_mask": mask, "use_cache": False})
        found.append((model.lm_head(hidden), wanted[:, place:]))
    return found


def loss_of(model: LlamaForCausalLM, head: Head, ids: torch.Tensor) -> torch.Tensor:
    """Mean divergence of the head's next token from the model's, in nats, of all places with their weights."""
    total = torch.zeros(())
    for place, (logits, wanted) in enumerate(places_of(model, head, ids)):
        said = functional.log_softmax(logits.float().flatten(0, 1), -1)
        target = functional.log_softmax(wanted.float().flatten(0, 1), -1)
        total = total + FADING**place * functional.kl_div(said, target, log_target=True, reduction="batchmean")
    return total


@torch.inference_mode()
def agreement(model: LlamaForCausalLM, head: Head, tokenizer: Tokenizer, num_batches: int = 4) -> list[float]:
    """Share of held-out tokens for which the head's best token equals the model's, by place."""
    data, right = Blocks(tokenizer, HELD_OUT_SEED), torch.zeros(PLACES)
    for _ in range(num_batches):
        pairs = places_of(model, head, data.take(8, 512)[:, :-1])
        right += torch.tensor([(a.argmax(-1) == b.argmax(-1)).float().mean().item() for a, b in pairs])
    return [round(share, 3) for share in (right / num_batches).tolist()]


def train(model: LlamaForCausalLM, head: Head, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    data, layer = Blocks(tokenizer, args.seed), head.layers[0]
    matrices = [head.fc.weight, *(p for p in layer.parameters() if p.dim() == 2)]
    norms = [p for p in head.parameters() if p.dim() == 1]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=0.0, weight_decay=0.02, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(norms, lr=0.0, weight_decay=0.0, betas=(0.9, 0.98)),
    ]
    began, recent = time.perf_counter(), list[float]()
    progress = tqdm(range(args.steps), desc="training", unit="step", mininterval=5)
    for step in progress:
        rate = args.learning_rate * min((step + 1) / 30, 0.02 + 0.49 * (1 + math.cos(math.pi * step / args.steps)))
        for group in itertools.chain.from_iterable(optimizer.param_groups for optimizer in optimizers):
            group["lr"] = rate
        ids = data.take(args.batch_tokens // BLOCK, BLOCK)[:, :-1]
        with torch.autocast("cpu", torch.bfloat16, enabled=args.autocast):
            loss = loss_of(model, head, ids)
        head.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        recent = [*recent[-49:], loss.item()]
        if (step + 1) % 50 == 0:
            tqdm.write(f"step {step + 1:5d}  loss {sum(recent) / len(recent):.4f}  {time.perf_counter() - began:.0f} s")
        if args.save_every and (step + 1) % args.save_every == 0:
            save(head, args.model)


def save(head: Head, folder: Path) -> None:
    """Add the head to the checkpoint, rounded to bf16, in place of one that is there."""
    path = folder / "model.safetensors"
    tensors = {name: value for name, value in load_file(path).items() if not name.startswith(PREFIX)}
    own = {f"{PREFIX}{name}": value.detach().bfloat16().contiguous() for name, value in head.state_dict().items()}
    save_file(tensors | own, path, metadata={"format": "pt"})
    path.chmod(0o644)
    config = json.loads((folder / "config.json").read_text())
    text = json.dumps(config | {"num_nextn_predict_layers": 1}, indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of the checkpoint, which is changed")
    add("--steps", type=int, default=700)
    add("--seed", type=int, default=2)
    add("--threads", type=int, default=1)
    add("--batch-tokens", type=int, default=2048, help="tokens a step")
    add("--learning-rate", type=float, default=4e-3, help="peak learning rate")
    add("--save-every", type=int, default=0, help="save after every so many steps too; 0: only at the end")
    add(
        "--autocast",
        action=argparse.BooleanOptionalAction,
        default=torch.ops.mkldnn._is_mkldnn_bf16_supported(),  # noqa: SLF001 - there is no public way to ask
        help="matrix products in bf16; default: where the CPU has instructions for it",
    )
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    began = time.perf_counter()
    model = LlamaForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval().requires_grad_(False)
    tokenizer, head = Tokenizer.from_file(str(args.model / "tokenizer.json")), Head(model)
    train(model, head, tokenizer, args)
    save(head, args.model)
    parameters = sum(p.numel() for p in head.parameters())
    print(f"head: {parameters:,} parameters, {args.steps} steps, {(time.perf_counter() - began) / 60:.1f} minutes")
    print(f"share of held-out tokens that are the model's own, by places: {agreement(model, head, tokenizer)}")


if __name__ == "__main__":
    main()
