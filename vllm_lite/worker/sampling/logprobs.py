"""Logprobs of tokens: finding them in the logits, and their form in the output."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.protocol.api import TokenLogprobs


def record_of(num_top: int) -> np.dtype[np.void]:
    """dtype of one token's record: its logprob and rank, and the likeliest tokens with their logprobs."""
    top = (num_top,)
    return np.dtype([("logprob", np.float32), ("rank", np.int32), ("ids", np.int32, top), ("values", np.float32, top)])


def find(
    logprobs: torch.Tensor,  # float32 [num_wanted, vocab], log-softmax of the raw logits
    tokens: torch.Tensor,  # int64 [num_wanted]
    num_top: int,  # at most vocab
) -> NDArray[np.void]:  # record_of(num_top) [num_wanted]
    """Find each token's logprob and rank, and the `num_top` most likely tokens at its position, likeliest first."""
    found = np.empty(len(tokens), record_of(num_top))
    chosen = logprobs.gather(1, tokens[:, None])
    values, ids = logprobs.topk(num_top, dim=1)
    found["logprob"] = chosen.squeeze(1).numpy(force=True)
    found["rank"] = (logprobs > chosen).sum(1).numpy(force=True) + 1
    found["ids"], found["values"] = ids.numpy(force=True), values.numpy(force=True)
    return found


def report(
    found: NDArray[np.void],  # record_of(...) [num_wanted]
    num_top: NDArray[Any],  # int [num_wanted]
) -> list[TokenLogprobs]:
    """Convert records to TokenLogprobs, each with its own number of likeliest tokens."""
    top = [
        tuple(zip(ids[:count], values[:count], strict=True))
        for ids, values, count in zip(found["ids"].tolist(), found["values"].tolist(), num_top.tolist(), strict=True)
    ]
    return [TokenLogprobs(*row) for row in zip(found["logprob"].tolist(), found["rank"].tolist(), top, strict=True)]
