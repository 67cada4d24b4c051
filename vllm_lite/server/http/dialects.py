"""In which form errors are answered. The path decides it, as there may be no route, no key and no body."""

from collections.abc import Callable, Mapping

from starlette.responses import Response
from starlette.types import Scope

from vllm_lite.server.http.paths import plain
from vllm_lite.server.openai.errors import ApiError

REQUEST_ID = "vllm_lite.request_id"
"""In a scope: the id that the response's X-Request-Id has."""

ErrorForm = Callable[[ApiError, str], Response]
"""Makes the response of an error to a request with this id."""


class Dialects:
    """The forms of errors by the beginning of a path, whole segments of it; OpenAI's where there is none."""

    def __init__(self, forms: Mapping[str, ErrorForm]) -> None:
        self._forms = dict(forms)

    def response(self, scope: Scope, error: ApiError) -> Response:
        path = plain(scope["path"]) + "/"
        form = next((form for start, form in self._forms.items() if path.startswith(f"{start}/")), None)
        return error.response() if form is None else form(error, scope.get(REQUEST_ID, ""))


OPENAI = Dialects({})
