"""/openapi.json, generated from the route table and the structs of bodies."""

import re
from typing import Any, get_args, get_type_hints

import msgspec

from vllm_lite import __version__
from vllm_lite.protocol.operations import PauseMode, WakeTag
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.server.http.auth import OPEN_PATHS
from vllm_lite.server.llama_server import errors as llama_cpp_errors
from vllm_lite.server.openai import bodies
from vllm_lite.server.route_table import EXAMPLES, ROUTES, TableRoute

_MODE = {"type": "string", "enum": list(get_args(PauseMode)), "default": "abort"}
_QUERIES: dict[str, dict[str, dict[str, Any]]] = {
    "/pause": {"mode": _MODE, "clear_cache": {"type": "boolean", "default": True}},
    "/sleep": {"level": {"type": "integer", "minimum": 0, "maximum": 2, "default": 1}, "mode": _MODE},
    "/get_world_size": {"include_dp": {"type": "boolean", "default": True}},
    "/wake_up": {"tags": {"type": "array", "items": {"type": "string", "enum": list(get_args(WakeTag))}}},
}
"""Query parameters of these paths."""
_ERROR_FORMS = (
    ("/v1/messages", "AnthropicError"),
    ("/api/", "OllamaError"),
    *((path, "LlamaCppError") for path in llama_cpp_errors.PATHS),
)
_WIDER = {"max_tokens", "seed", "stop"}
"""Fields for which a body accepts more values than SamplingParams."""
_ERRORS = {
    "400": "the request is at fault; `param` names the field",
    "401": "no valid API key",
    "403": "an admin key is needed, or the server answers to no such name (Host) or page (Origin)",
    "404": "no such model, request or path",
    "408": "the body came too slowly, or the deadline of the request has passed",
    "409": "the request id is in use, the request to fork has finished, or another API server has the stream",
    "413": "the body is too long",
    "415": "the body is not JSON",
    "429": "too many requests wait",
    "500": "the server failed",
    "503": "nothing can be served now",
}


def document(root: str = "") -> dict[str, Any]:
    """Make the OpenAPI document. `root` is the path under which a proxy exposes the server."""
    kinds = [route.body for route in ROUTES if route.body is not None]
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    _add_bounds(schemas)
    fork = schemas["ForkBody"]["properties"]
    schemas["ForkBody"]["properties"] = {name: fork[name] for name in fork if name in bodies.fields_of(bodies.ForkBody)}
    code = {"type": ["integer", "string"]}
    error_fields = {"message": {"type": "string"}, "type": {"type": "string"}, "code": code}
    error = {"type": "object", "properties": {**error_fields, "param": {"type": ["string", "null"]}}}
    schemas["Error"] = {"type": "object", "properties": {"error": error}, "required": ["error"]}
    texts = {"type": {"type": "string"}, "message": {"type": "string"}}
    inner = {"type": "object", "properties": texts, "required": ["type", "message"]}
    schemas["AnthropicError"] = {**schemas["Error"], "properties": {"type": {"const": "error"}, "error": inner}}
    schemas["OllamaError"] = {**schemas["Error"], "properties": {"error": {"type": "string"}}}
    inner = {"type": "object", "properties": {**texts, "code": {"type": "integer"}}}
    schemas["LlamaCppError"] = {**schemas["Error"], "properties": {"error": inner}}
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method] = _operation(route)
    components = {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
    info = {"title": "vllm_lite", "version": __version__}
    servers = {"servers": [{"url": root}]} if root else {}
    return {"openapi": "3.1.0", "info": info, **servers, "paths": paths, "components": components}


def _add_bounds(schemas: dict[str, Any]) -> None:
    """Add the bounds of sampling fields: bodies have none, as SamplingParams checks them."""
    hints = get_type_hints(SamplingParams, include_extras=True)
    for name in set(bodies.SAMPLING) - _WIDER:
        bounded = msgspec.json.schema(hints[name] | None)
        for schema in schemas.values():
            if name in schema.get("properties", {}):
                schema["properties"][name] = {**bounded, "default": None}


def _operation(route: TableRoute) -> dict[str, Any]:
    path, kind = route.path, route.body
    form = next((name for start, name in _ERROR_FORMS if path.startswith(start)), "Error")
    reference = {"application/json": {"schema": {"$ref": f"#/components/schemas/{form}"}}}
    errors = {code: {"description": text, "content": reference} for code, text in _ERRORS.items()}
    security: list[Any] = [] if path in OPEN_PATHS else [{}, {"key": []}]  # the first is for servers without keys
    operation: dict[str, Any] = {
        "summary": route.summary,
        "responses": {"200": {"description": "done"}, **errors},
        "security": security,
    }
    if kind is not None:
        body: dict[str, Any] = {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}
        if kind in EXAMPLES:
            body["example"] = EXAMPLES[kind]
        operation["requestBody"] = {"required": True, "content": {"application/json": body}}
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in _QUERIES.get(path, {}).items()]
    if parameters:
        operation["parameters"] = parameters
    return operation
