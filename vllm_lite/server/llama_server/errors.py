"""Errors in the format of llama.cpp's server: {"error": {"code": 400, "message": "...", "type": "..."}}."""

import msgspec
from starlette.responses import Response

from vllm_lite.server.openai.errors import ApiError

PATHS = ("/completion", "/infill", "/apply-template", "/props", "/slots")
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    503: "unavailable_error",
}


def body(error: ApiError) -> bytes:
    usual = "server_error" if error.status >= 500 else "invalid_request_error"
    kind = _KINDS.get(error.status, usual)
    if error.code == "context_length_exceeded":
        kind = "exceed_context_size_error"
    return msgspec.json.encode({"error": {"code": error.status, "message": error.message, "type": kind}})


def response(error: ApiError, request_id: str) -> Response:  # noqa: ARG001 - the header has it
    return Response(body(error), error.status, error.headers, "application/json")
