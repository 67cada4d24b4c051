"""Formatting of parameter counts."""


def describe_parameters(total: int, active: int) -> str:
    """Format as "124.4M", or "30.5B, 3.4B active"."""
    return _short(total) if active == total else f"{_short(total)}, {_short(active)} active"


def _short(count: int) -> str:
    """Format as "124.4M" or "30.5B"."""
    return f"{count / 1e9:,.1f}B" if count >= 1e9 else f"{count / 1e6:,.1f}M"
