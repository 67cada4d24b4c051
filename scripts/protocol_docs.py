"""Write docs/protocol.md and docs/protocol.schema.json from the messages' own declarations: make protocol

Text that is not about one message comes from protocol_prose.md. The clients that import nothing of vllm_lite get the
version's number; a test checks their messages.

With --check nothing is written; the exit status is 1 if one of them is out of date.
"""

import argparse
import ast
import inspect
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import protocol_example

from vllm_lite.engine.client_port import GATHER_S, HEARTBEAT_S, MAX_PASS_MESSAGES, MAX_PASS_S, SLOW_READER_S
from vllm_lite.engine.scheduling import external
from vllm_lite.protocol import PROTOCOL_VERSION, adapters, api, codec, control, operations, params, stats, step
from vllm_lite.protocol.codec import MAX_MESSAGE_BYTES
from vllm_lite.transport import zmq
from vllm_lite.transport.keys import ENV
from vllm_lite.worker.process import HEARTBEAT_EVERY_S

SCRIPTS = Path(__file__).resolve().parent
DOCS = SCRIPTS.parent / "docs"
CLIENTS = (SCRIPTS / "raw_client.py", SCRIPTS / "node" / "raw_client.mjs")
DIRECTIONS = {
    "Client to engine": api.FromClient,
    "Engine to client": api.ToClient,
    "Engine to worker": codec.ToWorker,
    "Worker to engine": codec.FromWorker,
}
HERE = "<!-- messages of clients -->\n"
MODULES = (api, operations, adapters, stats, params, step, control)
Kind = type[msgspec.Struct]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; tell whether the files are current")
    check = parser.parse_args().check
    stale = [path for path, text in files().items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if not check:
            path.write_text(files()[path])
        print(f"{path.name}: {'out of date; run `make protocol`' if check else 'written'}")
    return int(check and bool(stale))


@cache
def files() -> dict[Path, str]:
    """The text that each file should have."""
    made = {DOCS / "protocol.md": markdown(), DOCS / "protocol.schema.json": schema()}
    for client in CLIENTS:
        made[client] = re.sub(r"(?m)^((?:const )?VERSION = )\d+", rf"\g<1>{PROTOCOL_VERSION}", client.read_text())
    return made


# ---- the page


def markdown() -> str:
    about, about_workers = (SCRIPTS / "protocol_prose.md").read_text().format(**numbers()).split(HERE)
    parts, seen = [about], set[Kind]()
    for direction, union in DIRECTIONS.items():
        if direction == "Engine to worker":
            parts.append(about_workers)
        parts.append(f"## {direction}\n")
        messages = get_args(union)
        parts.append(overview(messages))
        parts += [section(kind) for kind in within(messages, seen)]
    return "\n".join(parts)


def numbers() -> dict[str, object]:
    """The numbers that the prose quotes."""
    return {
        "version": PROTOCOL_VERSION,
        "max_message_mib": MAX_MESSAGE_BYTES >> 20,
        "max_prompt_mib": api.MAX_PROMPT_BYTES >> 20,
        "max_ended": external.MAX_ENDED,
        "max_ended_mib": external.MAX_ENDED_BYTES >> 20,
        "max_kept_logprobs": external.MAX_LOGPROBS,
        "high_water_mark": zmq.HIGH_WATER_MARK,
        "handshake_s": zmq.HANDSHAKE_MS // 1000,
        "zmtp_heartbeat_s": zmq.HEARTBEAT_MS // 1000,
        "zmtp_timeout_s": zmq.HEARTBEAT_TIMEOUT_MS // 1000,
        "heartbeat_s": HEARTBEAT_S,
        "worker_heartbeat_s": HEARTBEAT_EVERY_S,
        "gather_ms": round(1000 * GATHER_S),
        "pass_messages": MAX_PASS_MESSAGES,
        "pass_ms": round(1000 * MAX_PASS_S),
        "slow_reader_s": round(SLOW_READER_S),
        "keys_env": ENV,
        "tokens_index": api.Tokens.__struct_fields__.index("index") + 1,
        "finished_index": api.Finished.__struct_fields__.index("index") + 1,
        "example": protocol_example.markdown(),
    }


def overview(messages: Sequence[Kind]) -> str:
    rows = [
        f"| `{json.dumps(kind.__struct_config__.tag)}` | [{kind.__name__}](#{kind.__name__.lower()}) "
        f"| {', '.join(f'`{name}`' for name in kind.__struct_fields__)} |"
        for kind in messages
    ]
    return "\n".join(["| tag | message | fields |", "| --- | --- | --- |", *rows, ""])


def within(messages: Sequence[Kind], seen: set[Kind]) -> Iterator[Kind]:
    """The messages, each followed by the structs that it contains, without those in `seen`."""
    for kind in messages:
        if kind not in seen:
            seen.add(kind)
            yield kind
            yield from within([part for hint in hints(kind).values() for part in structs_of(hint)], seen)


def structs_of(hint: Any) -> Iterator[Kind]:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint
    for part in get_args(hint):
        yield from structs_of(part)


def hints(kind: Kind) -> dict[str, Any]:
    found = get_type_hints(kind, include_extras=True)
    return {name: found[name] for name in kind.__struct_fields__}


def section(kind: Kind) -> str:
    config = kind.__struct_config__
    if not config.array_like:
        form = "a map with any of these names as keys"
    elif config.tag is None:
        form = "an array of its fields"
    else:
        form = f"an array: the tag `{json.dumps(config.tag)}`, then its fields"
    lines = [f"### {kind.__name__}\n", f"*{form[0].upper()}{form[1:]}.*\n"]
    own = vars(kind).get("__doc__")
    if own:
        paragraphs = inspect.cleandoc(own).split("\n\n")
        lines += [paragraph + "\n" for paragraph in paragraphs if not paragraph.startswith("Raises ")]
    if kind.__struct_fields__:
        lines += [*fields(kind), ""]
    return "\n".join(lines)


def fields(kind: Kind) -> Iterator[str]:
    first = 1 if kind.__struct_config__.tag is not None else 0
    is_array = kind.__struct_config__.array_like
    yield f"| {'place | ' if is_array else ''}field | type | default | bounds |"
    yield "| " + " | ".join(["---"] * (5 if is_array else 4)) + " |"
    notes = field_notes(kind)
    for place, field in enumerate(msgspec.structs.fields(kind), first):
        hint = hints(kind)[field.name]
        bounds = "; ".join(filter(None, [", ".join(bounds_of(hint)), notes.get(field.name, "")]))
        row = [f"`{field.name}`", spelled(hint), default_of(field), bounds]
        yield ("| " + " | ".join([str(place), *row] if is_array else row)).rstrip() + " |"


def default_of(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if isinstance(default, bytes):
        return "empty"
    return "nil" if default is None else f"`{json.dumps(msgspec.to_builtins(default))}`"


def spelled(hint: Any) -> str:
    """Name of a type in msgpack."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return "u32 bytes" if hint == api.TokenBytes else spelled(parts[0])
    if origin in (Union, UnionType):
        return " or ".join(spelled(part) for part in parts)
    if origin is Literal:
        return " or ".join(f"`{json.dumps(part)}`" for part in parts)
    if origin is tuple and parts[-1] is not Ellipsis:
        return f"({', '.join(spelled(part) for part in parts)})"
    if origin is dict:
        return f"map of {spelled(parts[0])} to {spelled(parts[1])}"
    if origin is not None:
        return f"array of {spelled(parts[0])}"
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "int: " + ", ".join(f"{int(item.value)} = {item.name}" for item in hint)
    return {NoneType: "nil", bytes: "bin"}.get(hint, getattr(hint, "__name__", str(hint)))


def bounds_of(hint: Any, of: str = "") -> Iterator[str]:
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        yield from bounds_of(parts[0], of)
        for meta in parts[1:]:
            yield from bounds_of_meta(meta, of)
    elif origin in (Union, UnionType):
        for part in parts:
            yield from bounds_of(part, of)
    elif origin is dict:
        yield from bounds_of(parts[1], "each ")
    elif origin is not None and origin is not Literal:
        for part in parts:
            yield from bounds_of(part, "each ")


def bounds_of_meta(meta: msgspec.Meta, of: str) -> Iterator[str]:
    is_length = meta.min_length is not None or meta.max_length is not None
    low = meta.min_length if is_length else meta.ge
    high = meta.max_length if is_length else meta.le
    words = [f"{of}length" if is_length else of.strip()]
    if meta.gt is not None:
        words.append(f"above {short(meta.gt)},")
    if low is not None:
        words.append(f"at least {short(low)}" if high is None else f"{short(low)} to {short(high)}")
    elif high is not None:
        words.append(f"at most {short(high)}")
    if len(words) > 1:
        yield " ".join(filter(None, words))


def short(number: float) -> str:
    if abs(number) >= 2**31 - 1:
        return f"{'-' if number < 0 else ''}2^{round(math.log2(abs(number) + 1))}{'' if number < 0 else ' - 1'}"
    return str(int(number)) if number == int(number) else str(number)


def field_notes(kind: Kind) -> dict[str, str]:
    """The docstrings below fields in the source."""
    notes, name = {}, ""
    module = sys.modules[kind.__module__]
    for node in class_of(module, kind.__name__).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
            notes[name] = re.sub(r"\s+", " ", str(node.value.value)).rstrip(".")
    return notes


@cache
def tree_of(module: ModuleType) -> ast.Module:
    return ast.parse(inspect.getsource(module))


def class_of(module: ModuleType, name: str) -> ast.ClassDef:
    return next(node for node in tree_of(module).body if isinstance(node, ast.ClassDef) and node.name == name)


# ---- the schema


def schema() -> str:
    """One JSON Schema of all messages as they would be in JSON, where bin is base64."""
    unions, definitions = msgspec.json.schema_components(list(DIRECTIONS.values()), ref_template="#/$defs/{name}")
    for name, definition in definitions.items():
        if "description" in definition:
            definition["description"] = inspect.cleandoc(definition["description"])
        kind = next((getattr(module, name) for module in MODULES if hasattr(module, name)), None)
        if kind is not None and definition.get("type") == "array":
            tag = [] if kind.__struct_config__.tag is None else ["tag"]
            for item, field in zip(definition["prefixItems"], [*tag, *kind.__struct_fields__], strict=True):
                item["title"] = field
    for direction, union in zip(DIRECTIONS, unions, strict=True):
        definitions[direction.title().replace(" ", "")] = union
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"vllm_lite protocol, version {PROTOCOL_VERSION}",
        "$defs": definitions,
    }
    return json.dumps(_without_property_names(document), indent=1) + "\n"


def _without_property_names(schema: Any) -> Any:
    """Return a schema without the allowed keys of maps, which not every release of msgspec lists."""
    if isinstance(schema, list):
        return [_without_property_names(item) for item in schema]
    if isinstance(schema, dict):
        return {key: _without_property_names(value) for key, value in schema.items() if key != "propertyNames"}
    return schema


if __name__ == "__main__":
    sys.exit(main())
