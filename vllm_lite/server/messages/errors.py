"""Errors in Anthropic's format: {"type": "error", "error": {"type", "message"}, "request_id"}."""

from typing import Any

import msgspec
from starlette.responses import Response

from vllm_lite.server.openai.errors import ApiError

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
PATHS = ("/v1/messages", "/messages")


def fields(error: ApiError, request_id: str) -> dict[str, Any]:
    kind = TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id or None}


def response(error: ApiError, request_id: str) -> Response:
    headers = {**error.headers, "request-id": request_id}
    return Response(msgspec.json.encode(fields(error, request_id)), error.status, headers, "application/json")
