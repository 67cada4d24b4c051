"""Stream a completion with pyzmq and msgpack alone: python scripts/raw_client.py ipc:///path/to/socket 1 415 333

An example to copy: nothing of vllm_lite is imported; docs/protocol.md has all the rest. If the engine dies, the stream
continues in its replacement. The prompt is token ids, or a text if the package `tokenizers` is installed and the
engine's tokenizer can be read here. For a tcp address --keys is the folder that `vllm-lite keys` made for this client.
"""

import argparse
import os
import re
import struct
import sys
from pathlib import Path
from typing import Any

import msgpack
import zmq

VERSION = 28
LOAD_S, SILENCE_S = 60, 30
"""Seconds that an engine may take to load, and seconds that it may be silent later while it owes an answer, although it
sends a sign of life every half second."""
HELLO, PING = ("hello", VERSION, None), ("ping",)
NOT_FINAL = [False]


class Lost(Exception):
    """The engine is gone, and another one may take its place at the same address."""


class Dying(Lost):
    """It said so, and that another one will."""


def connect(address: str, keys: Path | None) -> "zmq.Socket[bytes]":
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 500)  # an abort should still leave
    socket.setsockopt(zmq.HEARTBEAT_IVL, 5_000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30_000)
    socket.setsockopt(zmq.RECONNECT_IVL, 20)  # ZeroMQ tries again and again, for as long as nobody listens
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    try:
        if keys is not None:
            own, engine = (keys / "client.key_secret").read_text(), (keys / "server.key").read_text()
            socket.setsockopt(zmq.CURVE_PUBLICKEY, key("public", own))
            socket.setsockopt(zmq.CURVE_SECRETKEY, key("secret", own))
            socket.setsockopt(zmq.CURVE_SERVERKEY, key("public", engine))
        socket.connect(address)
    except (zmq.ZMQError, OSError, UnicodeDecodeError) as error:
        socket.close()
        sys.exit(f"raw_client: cannot connect to {address}, which must be ipc://PATH or tcp://HOST:PORT: {error}")
    return socket


def key(kind: str, text: str) -> bytes:
    match = re.search(rf'^\s*{kind}-key = "(.{{40}})"', text, re.MULTILINE)
    if match is None:
        sys.exit(f"raw_client: a file of --keys has no {kind}-key")
    return match.group(1).encode()


def send(socket: "zmq.Socket[bytes]", *message: object) -> None:
    """Tag and fields, in their order."""
    socket.send(msgpack.packb(message))


def receive(socket: "zmq.Socket[bytes]", timeout_s: int, nudge: tuple[object, ...]) -> Any:
    """Wait for the next message, and send `nudge` once a second meanwhile. If another engine has replaced this one,
    ZeroMQ has reconnected without notice, and the new engine refuses messages before Hello."""
    for _ in range(timeout_s):
        if socket.poll(1000):
            break
        send(socket, *nudge)
    else:
        raise Lost(f"nothing came within {timeout_s} s; is the address right, are the keys?")
    try:
        message = msgpack.unpackb(socket.recv())
    except ValueError:
        message = None
    if not isinstance(message, list) or not message:
        sys.exit("raw_client: what answers there is no engine; is the address right?")
    if message[0] == "dying" and message[2:] == NOT_FINAL:
        raise Dying(message[1])
    if message[:2] == ["refused", "say Hello first"]:
        raise Lost(message[1])
    if message[0] in ("refused", "dying"):
        sys.exit(f"raw_client: {message[0]}: {message[1]}")
    return message


def reach(address: str, keys: Path | None) -> tuple["zmq.Socket[bytes]", Any]:
    """Shake hands with the engine that is at the address, or will be. Returns its Welcome, too."""
    while True:
        socket = connect(address, keys)
        send(socket, *HELLO)
        try:
            return socket, receive(socket, LOAD_S, HELLO)
        except Dying:  # even as it started
            socket.close()
        except BaseException:
            socket.close()
            raise


def stream(
    address: str, keys: Path | None, socket: "zmq.Socket[bytes]", prompt: list[int], params: dict[str, object]
) -> Any:
    """Yields lists of token ids as they come. Ends with the request, not with the engine."""
    request_id, output, ended = os.urandom(12).hex(), list[int](), False
    try:
        while not ended:
            try:  # the tokens that have arrived are sent along, and the stream continues after them
                send(socket, "generate", request_id, packed(prompt), params, len(output), packed(output))
                while not ended:
                    message = receive(socket, SILENCE_S, PING)
                    for tag, _, start, token_ids, *rest in message[2] if message[0] == "outputs" else ():
                        new = token_ids[len(output) - start :]
                        output += new
                        yield new
                        ended = tag == "finished"
                        if ended and rest[0] == "error":
                            sys.exit(f"raw_client: {rest[2]}")
            except Lost:
                socket.close()
                socket, _ = reach(address, keys)
    finally:
        if not ended and not socket.closed:
            send(socket, "abort", request_id)


def packed(token_ids: list[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def load_tokenizer(folder: str | None) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    file = Path(folder or "/") / "tokenizer.json"
    return Tokenizer.from_file(str(file)) if file.is_file() else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", help="ipc://PATH or tcp://HOST:PORT of an engine")
    parser.add_argument("prompt", nargs="+", help="token ids, or a text")
    parser.add_argument("--keys", type=Path, metavar="FOLDER", help="client.key_secret and server.key, for tcp")
    parser.add_argument("--max-tokens", type=int, default=50)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()

    is_text = not all(word.isdecimal() for word in args.prompt)
    prompt = [] if is_text else [int(word) for word in args.prompt]
    if max(prompt, default=0) > 0xFFFFFFFF:
        sys.exit(f"raw_client: a token id is at most {0xFFFFFFFF}, got {max(prompt)}")

    socket, welcome = reach(args.address, args.keys)
    model, folder = welcome[3], welcome[9]
    tokenizer = load_tokenizer(folder) if is_text else None
    if tokenizer is not None:
        prompt = tokenizer.encode(" ".join(args.prompt)).ids
    elif is_text:
        sys.exit(f"raw_client: the tokenizer of {model} cannot be read here; give token ids")

    shown, output = 0, []
    params = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    for token_ids in stream(args.address, args.keys, socket, prompt, params):
        output += token_ids
        if tokenizer is None:
            print(*token_ids, end=" ", flush=True)
        else:
            text = tokenizer.decode(output).rstrip("\ufffd")  # the rest of a character comes later
            print(text[shown:], end="", flush=True)
            shown = len(text)
    print(tokenizer.decode(output)[shown:] if tokenizer else "")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Lost as lost:
        sys.exit(f"raw_client: {lost}")
    except KeyboardInterrupt:
        sys.exit(130)
