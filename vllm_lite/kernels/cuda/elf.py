"""Length of a cubin by its own headers: an ELF file of 64 bits, whose headers name the end of all that belongs to
it."""

import struct

from vllm_lite.kernels.cuda.compiler import KernelError

_MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_SEGMENT_OFFSET, _SEGMENT_SIZE = 8, 32
_SECTION_TYPE, _SECTION_OFFSET, _SECTION_SIZE = 4, 24, 32
_NO_BITS = 8
"""Type of a section that takes no room in the file."""


def is_elf(data: bytes) -> bool:
    return data.startswith(_MAGIC)


def elf_size(data: bytes) -> int:
    """Bytes up to the end of the tables, segments and sections that the headers name; those that `data` has no room for
    count as far as the tables say. Raises ValueError for what is no ELF file."""
    if not is_elf(data) or len(data) < 64:
        raise ValueError(f"no ELF file of 64 bits: it begins with {data[:6]!r} and has {len(data)} bytes")
    segments, sections = struct.unpack_from("<QQ", data, 32)
    segment_bytes, num_segments, section_bytes, num_sections = struct.unpack_from("<HHHH", data, 54)
    end: int = max(64, segments + segment_bytes * num_segments, sections + section_bytes * num_sections)
    for at in range(segments, segments + segment_bytes * num_segments, segment_bytes or 1):
        if at + _SEGMENT_SIZE + 8 <= len(data):
            end = max(end, _number(data, at + _SEGMENT_OFFSET) + _number(data, at + _SEGMENT_SIZE))
    for at in range(sections, sections + section_bytes * num_sections, section_bytes or 1):
        if at + _SECTION_SIZE + 8 <= len(data) and struct.unpack_from("<I", data, at + _SECTION_TYPE)[0] != _NO_BITS:
            end = max(end, _number(data, at + _SECTION_OFFSET) + _number(data, at + _SECTION_SIZE))
    return end


def _number(data: bytes, at: int) -> int:
    return int(struct.unpack_from("<Q", data, at)[0])


def whole_cubin(data: bytes) -> bytes:
    """`data` with its last byte: CuPy takes what NVRTC gives for text and drops the byte that would end it.

    It is a zero, the highest byte of a number in the last header. Raises KernelError where more is missing, and where
    this is no cubin.
    """
    try:
        size = elf_size(data)
    except ValueError as error:
        raise KernelError(f"NVRTC gave no cubin: {error}") from error
    if size - len(data) > 1:
        raise KernelError(f"the cubin has {len(data)} bytes, and its headers speak of {size}")
    return data.ljust(size, b"\0")
