"""Makes bodies of /inference/v1/generate of chats and completions: tokenized here, generated elsewhere."""

from typing import Any

import msgspec
from starlette.requests import Request

from vllm_lite.protocol.params import SamplingParams
from vllm_lite.server.calls.call import Call
from vllm_lite.server.http.dialects import REQUEST_ID
from vllm_lite.server.openai import forms
from vllm_lite.server.openai.bodies import Body, ChatBody, GenerateParams
from vllm_lite.server.openai.errors import ApiError

_ELSEWHERE = {"cache_salt", "priority", "structured_outputs", "response_format", "grammar"}
"""Fields that are outside of the sampling params, or added in one form."""
_NAMES = sorted(set(GenerateParams.__struct_fields__) & set(SamplingParams.__struct_fields__) - _ELSEWHERE)
_USUAL = SamplingParams()


def check(body: ChatBody) -> None:
    """Raise ApiError for forced tool calls, which a body of token ids cannot express."""
    tools = forms.tools_of(body)
    if tools is not None and tools.is_forced:
        raise ApiError(400, "tool_choice: calls that must be made cannot be rendered; use auto or none", "tool_choice")


def call_id(kind: str, request: Request, body: Body) -> str:
    """The id of a rendered request: the client's X-Request-Id, else the body's `request_id`, else a generated one."""
    given = request.scope[REQUEST_ID] if "x-request-id" in request.headers else body.request_id
    return f"{kind}-{given or request.scope[REQUEST_ID]}"


def requests(call: Call, body: Body, model: str) -> list[dict[str, Any]]:
    """Return one body for each prompt of `call`, which is not started."""
    form = forms.form_of(body)
    more = {} if form is None else {"structured_outputs": _given(form.params)}
    common = {"model": model, "stream": bool(body.stream)}
    common |= {} if body.stream_options is None else {"stream_options": _given(body.stream_options)}
    common |= {name: value for name in ("cache_salt", "priority") if (value := getattr(body, name)) is not None}
    return [
        {
            "request_id": call.id + stream.request_id.removeprefix(call.name),
            "token_ids": stream.prompt.token_ids,
            "token_offsets": None,
            "sampling_params": {**_sampling(stream.params), **more},
            **common,
        }
        for stream in call.streams
    ]


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """Return the non-default sampling params, and max_tokens, whose default differs between APIs."""
    values = {name: getattr(params, name) for name in _NAMES}
    said = {name: value for name, value in values.items() if value != getattr(_USUAL, name)}
    return {**said, "max_tokens": params.max_tokens}


def _given(struct: msgspec.Struct) -> dict[str, Any]:
    return {name: value for name, value in msgspec.to_builtins(struct).items() if value is not None}
