"""Columns that ranks hold in parts of different widths, gathered by a library that knows equal parts only."""

import torch


def own_part(x: torch.Tensor, widths: tuple[int, ...], rank: int) -> torch.Tensor:
    """The columns of x [n, sum of widths] that `rank` has filled, as [n, widest]; what is behind them is undefined."""
    start = sum(widths[:rank])
    part = torch.empty(x.shape[0], max(widths), dtype=x.dtype, device=x.device)
    part[:, : widths[rank]].copy_(x[:, start : start + widths[rank]])
    return part


def place_parts(parts: torch.Tensor, x: torch.Tensor, widths: tuple[int, ...]) -> None:
    """Copy `parts` [world, n, widest] to where they belong in x [n, sum of widths]."""
    start = 0
    for part, width in zip(parts, widths, strict=True):
        x[:, start : start + width].copy_(part[:, :width])
        start += width
