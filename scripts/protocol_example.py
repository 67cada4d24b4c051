"""One Hello and one Generate with their answers, byte for byte, for docs/protocol.md.

The client's two messages are as short as possible; the answers of the demo model are as the engine encodes them.
"""

from typing import Any

import msgspec

from vllm_lite.protocol import PROTOCOL_VERSION, api, codec

BYTES_A_LINE = 32
PROMPT, OUTPUT = (1, 40, 41, 42), [1542, 752, 744]

HELLO = ["hello", PROTOCOL_VERSION]
WELCOME = api.Welcome(
    version=PROTOCOL_VERSION,
    epoch=1795900551667847,
    model="demo_model",
    max_model_len=2048,
    vocab_size=2048,
    eos_token_ids=(1, 4),
    num_blocks=32768,
    block_size=16,
    tokenizer="/models/demo_model",
    is_supervised=True,
)
PARAMS = {"max_tokens": len(OUTPUT), "temperature": 0.0}
GENERATE = ["generate", "a1", b"".join(token.to_bytes(4, "little") for token in PROMPT), PARAMS]
TOKENS = api.OutputBatch(WELCOME.epoch, [api.Tokens("a1", 0, OUTPUT[:1])])
FINISHED = api.OutputBatch(WELCOME.epoch, [api.Finished("a1", 1, OUTPUT[1:], "length")])

FRAMES: tuple[tuple[str, bytes], ...] = (
    ("The client says Hello:", msgspec.msgpack.encode(HELLO)),
    ("The engine answers Welcome:", codec.engine_to_client.encode(WELCOME)),
    ("The client sends a Generate:", msgspec.msgpack.encode(GENERATE)),
    ("An OutputBatch comes with the first token:", codec.engine_to_client.encode(TOKENS)),
    ("And one with the others and the end:", codec.engine_to_client.encode(FINISHED)),
)


def markdown() -> str:
    """Each frame as an array, in which h'...' is a `bin`, and as hexadecimal digits."""
    parts = []
    for what, frame in FRAMES:
        lines = [frame[at : at + BYTES_A_LINE].hex(" ") for at in range(0, len(frame), BYTES_A_LINE)]
        shown = notation(msgspec.msgpack.decode(frame))
        parts += [what + "\n", "```", shown, *lines, "```", ""]
    return "\n".join(parts)


def notation(value: Any) -> str:
    """JSON, and h'...' for bytes."""
    if isinstance(value, bytes):
        return f"h'{value.hex()}'"
    if isinstance(value, list):
        return f"[{', '.join(map(notation, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{notation(key)}: {notation(inner)}" for key, inner in value.items()) + "}"
    return msgspec.json.encode(value).decode()
