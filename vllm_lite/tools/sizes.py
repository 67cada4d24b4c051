"""Sizes in bytes, formatted for people."""


def size_text(num_bytes: int) -> str:
    """Format a size with the largest unit up to it: 1.2 GiB."""
    for unit, count in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= count:
            return f"{num_bytes / count:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} KiB"
