"""Cost of `--quantization` and an 8-bit KV cache in accuracy: perplexity, divergence, logit errors, greedy tokens.

    python benchmarks/quantization_quality.py [--model DIR] [--quantization int8 int4_g32] [--kv-cache-dtype int8]
        [--text FILE] [--out FILE.json]

The text is FILE, or a sample of the unquantized model at temperature 1, so that any model can be measured, even one
with random weights. Both models then read it through our layers and attention. Run it again with VLLM_LITE_ISA=baseline
for products without quantized rows (only the weights are quantized).
"""

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

import torch

from vllm_lite import LLM, SamplingParams
from vllm_lite.attention.backend import AttentionShape
from vllm_lite.attention.select import select_backend
from vllm_lite.attention.step_batch import StepBatch
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.quantization.on_load import Quantization
from vllm_lite.client.engines.launch import resolve
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.config import DEMO_MODEL, EngineConfig
from vllm_lite.kernels.cpu.weights.linear import multiplies_bytes
from vllm_lite.models.registry import Sizes, build
from vllm_lite.models.weights import load_weights
from vllm_lite.worker.device import KV_DTYPES
from vllm_lite.worker.memory.cache_engine import CacheEngine

BLOCK_SIZE = 16


class Reader:
    """A model that returns its logits at every position of a text."""

    def __init__(
        self,
        path: str,
        length: int,
        quantization: Quantization | None,
        kv_dtype: torch.dtype,
        *,
        dtype: torch.dtype = torch.bfloat16,
        exact: bool = False,
    ) -> None:
        """`exact`: the setting --exact-activations."""
        spec, device = load_spec(path), torch.device("cpu")
        sizes = Sizes(length, length, exact_activations=exact)
        self.model = build(spec, dtype, device, sizes, quantization)
        load_weights(self.model, path)
        num_blocks = -(-length // BLOCK_SIZE)
        self.blocks = torch.arange(num_blocks, dtype=torch.int32)
        self.num_groups = len(spec.kv_groups)
        cache = CacheEngine(spec, BLOCK_SIZE, num_blocks, 0, kv_dtype, device)
        self.kv_caches = cache.layer_views()
        groups = tuple(group.attention for group in spec.kv_groups)
        self.backend = select_backend(AttentionShape(groups, BLOCK_SIZE, dtype, device, kv_dtype))

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: int64 [n] -> float32 [n, vocab_size]; the whole text in one step."""
        count = len(tokens)
        positions = torch.arange(count)
        batch = StepBatch(
            num_tokens=count,
            num_seqs=1,
            max_query_len=count,
            max_seq_len=count,
            token_ids=tokens,
            positions=positions,
            query_start_loc=torch.tensor([0, count], dtype=torch.int32),
            seq_lens=torch.tensor([count], dtype=torch.int32),
            block_tables=(self.blocks[None],) * self.num_groups,
            slot_mapping=(positions,) * self.num_groups,
        )
        self.backend.prepare(batch)
        hidden = self.model.forward(batch, self.kv_caches, self.backend)
        return self.model.logits(hidden).float().clone()


def sample_texts(path: str, num_texts: int, length: int) -> list[torch.Tensor]:
    """Texts that the model samples after one token, at temperature 1 without filters."""
    with LLM(path, dtype="bfloat16", max_model_len=length) as llm:
        params = [
            SamplingParams(temperature=1.0, seed=seed, max_tokens=length - 1, ignore_eos=True, detokenize=False)
            for seed in range(num_texts)
        ]
        results = llm.generate([[1]] * num_texts, params)
    return [torch.tensor([1, *result.outputs[0].token_ids]) for result in results]


def read_texts(path: str, file: Path, num_texts: int, length: int) -> list[torch.Tensor]:
    """The first `num_texts` pieces of the file, each of `length` tokens."""
    tokens = torch.tensor(Tokenizer.load(path).encode(file.read_text()[: 16 * num_texts * length]))
    pieces = tokens[: len(tokens) // length * length].view(-1, length)
    if len(pieces) < num_texts:
        raise SystemExit(f"{file} has {len(pieces)} pieces of {length} tokens; --num-texts is {num_texts}")
    return list(pieces[:num_texts])


def all_logits(
    path: str, texts: list[torch.Tensor], form: Quantization | None, kv_dtype: torch.dtype
) -> list[torch.Tensor]:
    """The model's logits at every position but the last of each text: float32 [length - 1, vocab_size] each."""
    reader = Reader(path, len(texts[0]), form, kv_dtype)
    return [reader.logits(tokens)[:-1] for tokens in texts]


def perplexity(logits: list[torch.Tensor], texts: list[torch.Tensor]) -> float:
    parts = [-each.log_softmax(-1).gather(1, text[1:, None]) for each, text in zip(logits, texts, strict=True)]
    return float(torch.cat(parts).mean().exp())


def compare(exact: list[torch.Tensor], others: list[torch.Tensor], texts: list[torch.Tensor]) -> dict[str, float]:
    """Means over all positions, in nats; logit errors relative to the spread of a position's logits."""
    divergence, error, same = [], [], []
    for left, right in zip(exact, others, strict=True):
        log_p, log_q = left.log_softmax(-1), right.log_softmax(-1)
        divergence.append((log_p.exp() * (log_p - log_q)).sum(-1))
        error.append((right - left).std(-1) / left.std(-1))
        same.append((left.argmax(-1) == right.argmax(-1)).float())
    return {
        "perplexity": round(perplexity(others, texts), 4),
        "divergence_nats": round(float(torch.cat(divergence).mean()), 6),
        "logit_error": round(float(torch.cat(error).mean()), 5),
        "same_greedy_token": round(float(torch.cat(same).mean()), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--quantization", nargs="*", default=["int8"], choices=get_args(Quantization))
    parser.add_argument("--kv-cache-dtype", choices=sorted(KV_DTYPES), help="measured beside, with weights as they are")
    parser.add_argument("--text", type=Path, help="a file to read instead of what the model writes")
    parser.add_argument("--num-texts", type=int, default=32)
    parser.add_argument("--length", type=int, default=256, help="tokens of a text")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    args = parser.parse_args()
    model = resolve(EngineConfig(model=args.model)).model  # its folder
    with torch.inference_mode():
        if args.text is None:
            texts = sample_texts(model, args.num_texts, args.length)
        else:
            texts = read_texts(model, args.text, args.num_texts, args.length)
        exact = all_logits(model, texts, None, torch.bfloat16)
        schemes = {}
        for form in args.quantization:
            schemes[form] = compare(exact, all_logits(model, texts, form, torch.bfloat16), texts)
        if args.kv_cache_dtype is not None:
            others = all_logits(model, texts, None, KV_DTYPES[args.kv_cache_dtype])
            schemes[f"KV cache {args.kv_cache_dtype}"] = compare(exact, others, texts)
    figures = {
        "model": Path(args.model).name,
        "text": "sampled" if args.text is None else args.text.name,
        "rows": "quantized" if multiplies_bytes() else "as they are",
        "positions": args.num_texts * (args.length - 1),
        "perplexity": round(perplexity(exact, texts), 4),
        "schemes": schemes,
    }
    print(json.dumps(figures, indent=2))
    if args.out is not None:
        args.out.write_text(json.dumps({"date": f"{datetime.now(UTC):%F}", **figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
