"""The layouts of a KV cache, converted into each other, and attention over them in float64: the truth of the tests.

engine: [num_blocks, 2, num_kv_heads, block_size, head_size], keys then values; a block's bytes are contiguous.
split:  keys [num_blocks, num_kv_heads, head_size / x, block_size, x], x = 16 / itemsize;
        values [num_blocks, num_kv_heads, head_size, block_size].
flash:  [2, num_blocks, block_size, num_kv_heads, head_size].
"""

import math

import torch


def to_split(engine: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks, _, heads, block, size = engine.shape
    x = 16 // engine.element_size()
    keys = engine[:, 0].reshape(blocks, heads, block, size // x, x).transpose(2, 3).contiguous()
    return keys, engine[:, 1].transpose(2, 3).contiguous()


def from_split(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    blocks, heads, parts, block, x = keys.shape
    rows = keys.transpose(2, 3).reshape(blocks, heads, block, parts * x)
    return torch.stack([rows, values.transpose(2, 3)], dim=1)


def to_flash(engine: torch.Tensor) -> torch.Tensor:
    return engine.permute(1, 0, 3, 2, 4).contiguous()


def from_flash(flash: torch.Tensor) -> torch.Tensor:
    return flash.permute(1, 0, 3, 2, 4).contiguous()


def gather(
    engine: torch.Tensor,
    block_table: torch.Tensor,  # int [max_blocks], of one sequence
    seq_len: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # each float64 [num_kv_heads, seq_len, head_size]
    """Keys and values of one sequence, in order, without the slots behind its end."""
    _, _, heads, block, size = engine.shape
    pages = block_table[: math.ceil(seq_len / block)].long()
    rows = engine[pages].permute(1, 2, 0, 3, 4).reshape(2, heads, -1, size)[:, :, :seq_len].to(torch.float64)
    return rows[0], rows[1]


def attend(
    q: torch.Tensor,  # [num_heads, head_size]
    keys: torch.Tensor,  # float64 [num_kv_heads, num_tokens, head_size]
    values: torch.Tensor,  # the same
    scale: float,
    *,
    soft_cap: float = 0.0,
    bias: torch.Tensor | None = None,  # added to the logits: [num_heads, num_tokens] or [num_tokens]
    mask: torch.Tensor | None = None,  # bool, same shapes: which tokens take part
    sinks: torch.Tensor | None = None,  # [num_heads]
) -> torch.Tensor:  # float64 [num_heads, head_size]
    """Attention of one query token over one sequence; zeros if no token is visible."""
    group = q.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    logits = torch.einsum("hd,htd->ht", q.to(torch.float64), keys) * scale
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    if bias is not None:
        logits = logits + bias
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf)
    if logits.shape[1] == 0:
        return torch.zeros_like(q, dtype=torch.float64)
    if sinks is not None:
        logits = torch.cat((logits, sinks[:, None].to(torch.float64)), -1)
    probabilities = torch.softmax(logits, -1).nan_to_num(0.0)[:, : keys.shape[1]]
    return torch.einsum("ht,htd->hd", probabilities, values)
