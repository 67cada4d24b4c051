"""ALiBi's slopes, by which scores fall with the distance of a key (Press et al. 2022); no checkpoint stores them."""

import struct


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """The slope of each head, as transformers has them for BLOOM, in any number of heads.

    A power of two, n, has the slopes b, b^2, ..., b^n with b = 2^(-8/n). Further heads take the odd powers of the base
    that twice as many have. Bases are rounded to float32 first, which the models were trained with: after 128 powers it
    shows. Raises ValueError unless there is a head.
    """
    if num_heads < 1:
        raise ValueError(f"num_heads must be at least 1, got {num_heads}")
    even = 1 << (num_heads.bit_length() - 1)
    base, further = _base(even), _base(2 * even)
    more = (further**power for power in range(1, 2 * (num_heads - even), 2))
    return (*(base**power for power in range(1, even + 1)), *more)


def _base(num_heads: int) -> float:
    """2^(-8 / num_heads) in float32."""
    return float(struct.unpack("<f", struct.pack("<f", 2.0 ** (-8 / num_heads)))[0])
