"""Addresses of listening processes: ipc:// for this machine, tcp:// for others."""

import os
from contextlib import suppress
from ipaddress import ip_address


def check_address(address: str) -> None:
    """Raise ValueError unless `address` is an ipc:// or inproc:// endpoint."""
    scheme, _, path = address.partition("://")
    if scheme not in ("ipc", "inproc") or not path:
        raise ValueError(f"address must look like ipc:///path/to/socket, got {address!r}")
    if scheme == "ipc" and len(os.fsencode(path)) > 107:
        raise ValueError(f"an ipc path has at most 107 bytes, got {len(os.fsencode(path))}: {path}")


def split_tcp(address: str) -> tuple[str, int]:
    """IP address and port of an engine's tcp://IP:PORT. Raises ValueError."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if address.startswith("tcp://") and port.isdecimal() and 1 <= int(port) <= 65535:
        with suppress(ValueError):
            return str(ip_address(host)), int(port)
    raise ValueError(
        f"tcp_address must look like tcp://IP:PORT, for example tcp://0.0.0.0:5555 or tcp://[::]:5555, got {address!r}"
    )


def offset(endpoint: str, rank: int) -> str:
    """The endpoint of engine number `rank` of several: `rank` is added to the port, or appended to the path."""
    base, _, port = endpoint.rpartition(":")
    return f"{base}:{int(port) + rank}" if endpoint.startswith("tcp://") else f"{endpoint}.{rank}"
