"""/openapi.json, made of the structs that bodies are decoded into, and a page that shows it."""

from typing import Any, get_type_hints

import msgspec

from vllm_lite import __version__
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.server.openai.bodies import (
    SAMPLING,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    ForkBody,
    GenerateBody,
    TokenizeBody,
)

_BODIES: dict[str, tuple[type[msgspec.Struct], str]] = {
    "/v1/completions": (CompletionBody, "continue a prompt"),
    "/v1/chat/completions": (ChatBody, "answer messages"),
    "/inference/v1/generate": (GenerateBody, "continue token ids with token ids"),
    "/tokenize": (TokenizeBody, "text or messages to token ids"),
    "/detokenize": (DetokenizeBody, "token ids to text"),
    "/v1/requests/{request_id}/fork": (ForkBody, "branches of a request that runs, answered as that is"),
}
_GETS = {
    "/health": "200 if a request would be served",
    "/health/live": "200 as long as the engine lives",
    "/health/ready": "as /health",
    "/ping": "as /health",
    "/version": "of this server",
    "/load": "how many requests run",
    "/metrics": "what Prometheus reads",
    "/v1/models": "what is served",
    "/v1/models/{model}": "one of them",
}
_WIDER = {"max_tokens", "seed", "stop"}
"""Fields of which a body takes more than SamplingParams does."""
_OPEN = ("/health", "/health/live", "/health/ready", "/ping")
_ERRORS = {
    "400": "the request is at fault; `param` names the field",
    "401": "no valid API key",
    "403": "an admin key is needed",
    "404": "no such model, request or path",
    "408": "the body came too slowly, or the deadline of the request has passed",
    "409": "the request id is in use, or the request to fork has finished",
    "413": "the body is too long",
    "415": "the body is not JSON",
    "429": "too many requests wait",
    "500": "the server failed",
    "503": "nothing can be served now",
}

PAGE = b"""<!doctype html>
<meta charset="utf-8"><title>vllm_lite</title>
<style>body{font:15px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}code,pre{background:#8882}
summary{cursor:pointer;padding:.3em 0}td{padding:.1em 1em .1em 0;vertical-align:top}</style>
<h1>vllm_lite</h1><p>What <a href="openapi.json">openapi.json</a> says:</p><main></main>
<script>
const show = (tag, text, parent) => {
  const element = document.createElement(tag)
  element.textContent = text
  parent.append(element)
  return element
}
fetch("openapi.json").then(answer => answer.json()).then(doc => {
  const main = document.querySelector("main"), schemas = doc.components.schemas
  for (const [path, methods] of Object.entries(doc.paths)) for (const [method, route] of Object.entries(methods)) {
    const part = show("details", "", main)
    show("summary", `${method.toUpperCase()} ${path}: ${route.summary}`, part)
    const body = route.requestBody?.content["application/json"].schema.$ref.split("/").pop()
    const table = show("table", "", part)
    for (const [name, field] of Object.entries(schemas[body]?.properties ?? {})) {
      const row = show("tr", "", table)
      show("code", name, show("td", "", row)); show("td", JSON.stringify(field), row)
    }
  }
})
</script>
"""
"""Without anything from elsewhere: it works where there is no network, and nobody learns that it was looked at."""


def document() -> dict[str, Any]:
    """The OpenAPI document."""
    _, schemas = msgspec.json.schema_components(
        [kind for kind, _ in _BODIES.values()], ref_template="#/components/schemas/{name}"
    )
    _add_bounds(schemas)
    code = {"type": ["integer", "string"]}
    error_fields = {"message": {"type": "string"}, "type": {"type": "string"}, "code": code}
    error = {"type": "object", "properties": {**error_fields, "param": {"type": ["string", "null"]}}}
    schemas["Error"] = {"type": "object", "properties": {"error": error}, "required": ["error"]}
    paths: dict[str, Any] = {path: {"get": _route(path, summary)} for path, summary in _GETS.items()}
    paths["/v1/models/{model}"]["get"]["parameters"] = [_path_parameter("model")]
    for path, (kind, summary) in _BODIES.items():
        reference = {"$ref": f"#/components/schemas/{kind.__name__}"}
        body = {"required": True, "content": {"application/json": {"schema": reference}}}
        paths[path] = {"post": {**_route(path, summary), "requestBody": body}}
    request = {"parameters": [_path_parameter("request_id")]}
    paths["/v1/requests/{request_id}"] = {
        "get": {**_route("/v1/requests", "how a request is, and why it waits"), **request},
        "delete": {**_route("/v1/requests", "end a request"), **request},
    }
    paths["/v1/requests/{request_id}/fork"]["post"].update(request)
    paths["/reset_prefix_cache"] = {"post": _route("/reset_prefix_cache", "forget the KV of earlier prompts (admin)")}
    return {
        "openapi": "3.1.0",
        "info": {"title": "vllm_lite", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _add_bounds(schemas: dict[str, Any]) -> None:
    """Bodies leave the bounds of sampling to SamplingParams."""
    hints = get_type_hints(SamplingParams, include_extras=True)
    for name in set(SAMPLING) - _WIDER:
        bounded = msgspec.json.schema(hints[name] | None)
        for schema in schemas.values():
            if name in schema.get("properties", {}):
                schema["properties"][name] = {**bounded, "default": None}


def _route(path: str, summary: str) -> dict[str, Any]:
    reference = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    errors = {code: {"description": text, "content": reference} for code, text in _ERRORS.items()}
    security: list[dict[str, list[str]]] = (
        [] if path in _OPEN else [{}, {"key": []}]
    )  # the first: where no keys are set
    return {"summary": summary, "responses": {"200": {"description": "done"}, **errors}, "security": security}


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
