"""Dialects: the format of errors. The path decides it, as a request may have no route, no key and no body."""

from collections.abc import Callable, Mapping

from starlette.responses import Response
from starlette.types import Scope

from vllm_lite.server.http.paths import plain
from vllm_lite.server.openai.errors import ApiError

REQUEST_ID = "vllm_lite.request_id"
"""Scope key: the request id that the response's X-Request-Id has."""

ErrorForm = Callable[[ApiError, str], Response]
"""Makes the response for an error and a request id."""


class Dialects:
    """Formats of errors by path prefix, in whole segments; OpenAI's for other paths."""

    def __init__(self, forms: Mapping[str, ErrorForm]) -> None:
        self._forms = dict(forms)

    def response(self, scope: Scope, error: ApiError) -> Response:
        path = plain(scope["path"]) + "/"
        form = next((form for start, form in self._forms.items() if path.startswith(f"{start}/")), None)
        return error.response() if form is None else form(error, scope.get(REQUEST_ID, ""))


OPENAI = Dialects({})
