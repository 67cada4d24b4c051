"""Errors in Ollama's format: {"error": "a sentence"}."""

import msgspec
from starlette.responses import Response

from vllm_lite.server.openai.errors import ApiError

PATHS = ("/api",)


def body(error: ApiError) -> bytes:
    return msgspec.json.encode({"error": error.message})


def response(error: ApiError, request_id: str) -> Response:  # noqa: ARG001 - the header has it
    return Response(body(error), error.status, error.headers, "application/json")
