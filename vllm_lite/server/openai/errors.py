"""ApiError: error answers in OpenAI's format: {"error": {"message", "type", "param", "code"}}."""

import re

import msgspec
from starlette.responses import Response

from vllm_lite.errors import ContextLengthError, EngineError, VllmLiteError

_ADDRESS = re.compile(r"\b(ipc|inproc|tcp)://[^\s:]+")
MAX_SHOWN_CHARS = 200
TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    431: "RequestTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class ApiError(Exception):
    """An error answer with HTTP `status`. `param` names the invalid field of the body; `code` is the status unless
    clients know the error by a name."""

    kind: str | None = None
    """The error's type; None: that of its status."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        headers: dict[str, str] | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = headers or {}
        self.code = code

    def body(self) -> bytes:
        """Encode the error as OpenAI does."""
        usual = "InternalServerError" if self.status >= 500 else "BadRequestError"
        kind = self.kind or TYPES.get(self.status, usual)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code or self.status}
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers, "application/json")


class InvalidUserInput(ApiError):
    """An invalid body, under the error type of vLLM's adapter routes."""

    kind = "InvalidUserInput"


def shown(text: str) -> str:
    """Format a client's text for an error: bounded, and on one line."""
    text = text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."
    return text if text.isprintable() else ascii(text)[1:-1]


def in_use(call_id: str) -> ApiError:
    return ApiError(409, f"request id {call_id!r} is in use; choose another", "request_id")


def refused(error: VllmLiteError, param: str | None = None) -> ApiError:
    """The answer for `error` before anything was generated: the request's fault, or the engine's."""
    if isinstance(error, EngineError):
        return ApiError(503, public_text(error))
    code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
    return ApiError(400, str(error), param, code=code)


def failed(error: VllmLiteError) -> ApiError:
    """The answer for `error` of a running request that is not its fault: the engine has died, or there is a bug."""
    return ApiError(503 if isinstance(error, EngineError) else 500, public_text(error))


def public_text(error: VllmLiteError) -> str:
    """Return the text of `error` for clients, without addresses of this machine."""
    return _ADDRESS.sub("its address", str(error))
