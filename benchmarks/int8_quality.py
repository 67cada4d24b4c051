"""What `--quantization` costs in accuracy: perplexity, divergence and logit errors against the model as it is.

    python benchmarks/int8_quality.py [--model DIR] [--quantization int4] [--out benchmarks/results/int8-quality.json]

The text is what the unquantized model samples at temperature 1 by itself, so that any model can be measured, also one
with random weights. Both models then read it through our layers and attention. Run it once more with
VLLM_LITE_ISA=avx512 for products that leave the rows as they are (weights alone quantized).
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
from vllm_lite.client.launch import resolve
from vllm_lite.config import DEMO_MODEL, EngineConfig
from vllm_lite.kernels.cpu.linear import multiplies_bytes
from vllm_lite.layers.matmul import Quantization
from vllm_lite.models.registry import Sizes, build
from vllm_lite.models.weights import load_weights
from vllm_lite.worker.memory.cache_engine import CacheEngine

BLOCK_SIZE = 16


class Reader:
    """A model that says its logits at every position of a text."""

    def __init__(self, path: str, length: int, quantization: Quantization | None) -> None:
        spec, device = load_spec(path), torch.device("cpu")
        self.model = build(spec, "bfloat16", device, Sizes(length, length), quantization)
        load_weights(self.model, path)
        num_blocks = -(-length // BLOCK_SIZE)
        self.blocks = torch.arange(num_blocks, dtype=torch.int32)
        self.num_groups = len(spec.kv_groups)
        cache = CacheEngine(spec, BLOCK_SIZE, num_blocks, 0, torch.bfloat16, device)
        self.kv_caches = cache.layer_views()
        groups = tuple(group.attention for group in spec.kv_groups)
        self.backend = select_backend(AttentionShape(groups, BLOCK_SIZE, torch.bfloat16, device))

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
    """Texts that the model writes from one token on, without a limit on how unlikely a token is."""
    with LLM(path, dtype="bfloat16", max_model_len=length) as llm:
        params = [
            SamplingParams(temperature=1.0, seed=seed, max_tokens=length - 1, ignore_eos=True, detokenize=False)
            for seed in range(num_texts)
        ]
        results = llm.generate([[1]] * num_texts, params)
    return [torch.tensor([1, *result.outputs[0].token_ids]) for result in results]


def measure(path: str, texts: list[torch.Tensor], quantization: Quantization) -> dict[str, float]:
    """Means over all positions, in nats; logit errors relative to the spread of a position's logits."""
    exact, quantized = (Reader(path, len(texts[0]), form) for form in (None, quantization))
    loss, quantized_loss, divergence, error, same = [], [], [], [], []
    for tokens in texts:
        logits, others = exact.logits(tokens)[:-1], quantized.logits(tokens)[:-1]
        log_p, log_q = logits.log_softmax(-1), others.log_softmax(-1)
        nexts = tokens[1:, None]
        loss.append(-log_p.gather(1, nexts))
        quantized_loss.append(-log_q.gather(1, nexts))
        divergence.append((log_p.exp() * (log_p - log_q)).sum(-1))
        error.append((others - logits).std(-1) / logits.std(-1))
        same.append((logits.argmax(-1) == others.argmax(-1)).float())

    def mean(parts: list[torch.Tensor]) -> float:
        return float(torch.cat([part.flatten() for part in parts]).mean())

    return {
        "perplexity": round(float(torch.tensor(mean(loss)).exp()), 4),
        f"perplexity_{quantization}": round(float(torch.tensor(mean(quantized_loss)).exp()), 4),
        "divergence_nats": round(mean(divergence), 6),
        "logit_error": round(mean(error), 5),
        "same_greedy_token": round(mean(same), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--quantization", default="int8", choices=get_args(Quantization))
    parser.add_argument("--num-texts", type=int, default=32)
    parser.add_argument("--length", type=int, default=256, help="tokens of a text")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    args = parser.parse_args()
    model = resolve(EngineConfig(model=args.model)).model  # its folder
    with torch.inference_mode():
        texts = sample_texts(model, args.num_texts, args.length)
        figures = {
            "model": Path(args.model).name,
            "rows": "quantized" if multiplies_bytes() else "as they are",
            "positions": args.num_texts * (args.length - 1),
            **measure(model, texts, args.quantization),
        }
    print(json.dumps(figures, indent=2))
    if args.out is not None:
        args.out.write_text(json.dumps({"date": f"{datetime.now(UTC):%F}", **figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
