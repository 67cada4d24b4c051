"""Frames on a socket between a process and its helper process: a length in 4 bytes, then a struct as msgpack."""

import socket

import msgspec

MAX_FRAME_BYTES = 1024 * 1024 * 1024
LENGTH_BYTES = 4
_PIECE_BYTES = 1 << 20
_encoder = msgspec.msgpack.Encoder()


def frame(message: msgspec.Struct) -> bytearray:
    """Encode `message` as a frame, in a single buffer: a copy of a long chat would be large."""
    data = bytearray(LENGTH_BYTES)
    _encoder.encode_into(message, data, LENGTH_BYTES)
    data[:LENGTH_BYTES] = (len(data) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little")
    return data


def read_frame(wire: socket.socket) -> bytearray:
    """Read one frame; empty at the end of the stream. Raises MemoryError without memory for it; the next can still be
    read."""
    length = int.from_bytes(_read_into(wire, bytearray(LENGTH_BYTES)), "little")
    if length > MAX_FRAME_BYTES:
        return bytearray()
    try:
        data = bytearray(length)
    except MemoryError:
        for start in range(0, length, _PIECE_BYTES):
            _read_into(wire, bytearray(min(_PIECE_BYTES, length - start)))
        raise
    return _read_into(wire, data)


def _read_into(wire: socket.socket, data: bytearray) -> bytearray:
    """Fill `data` and return it, or an empty array if the socket is closed."""
    place, view = 0, memoryview(data)
    while place < len(data):
        count = wire.recv_into(view[place:])
        if not count:
            return bytearray()
        place += count
    return data
