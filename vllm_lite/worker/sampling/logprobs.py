"""From log-softmax to what is reported of a token: its logprob, its rank, and the likeliest tokens beside it."""

from typing import Any

import torch
from numpy.typing import NDArray

from vllm_lite.protocol.api import TokenLogprobs


def report(
    logprobs: torch.Tensor,  # float32 [num_wanted, vocab], log-softmax of the raw logits
    tokens: torch.Tensor,  # int64 [num_wanted]
    num_top: NDArray[Any],  # int [num_wanted]
) -> list[TokenLogprobs]:
    """The token's logprob and rank, and the most likely tokens, most likely first."""
    chosen = logprobs.gather(1, tokens[:, None])
    ranks = ((logprobs > chosen).sum(1) + 1).tolist()
    values, ids = logprobs.topk(min(int(num_top.max()), logprobs.shape[1]), dim=1)
    top = [
        tuple(zip(row_ids[:count], row_values[:count], strict=True))
        for row_ids, row_values, count in zip(ids.tolist(), values.tolist(), num_top.tolist(), strict=True)
    ]
    return [TokenLogprobs(*row) for row in zip(chosen.squeeze(1).tolist(), ranks, top, strict=True)]
