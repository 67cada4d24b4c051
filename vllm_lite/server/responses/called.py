"""WrittenCall: one call of the model while its arguments arrive, as the fields of an item and the deltas of a
stream."""

import re
from typing import Any

import msgspec

from vllm_lite.client.text.response.arguments import arguments_of
from vllm_lite.server.responses.client_tools import FORMS, Item, decoded
from vllm_lite.server.responses.toolbox import ClientTool

_INPUT = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_START_CHARS = 64
"""Arguments longer than this that do not match _INPUT have another format."""
_WHOLE = re.compile(
    r'(?:[^"\\]|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4})*', re.DOTALL
)
"""Characters of a JSON string, up to its end or to an incomplete escape or surrogate pair."""


class WrittenCall:
    """Collects the arguments of one call piece by piece."""

    def __init__(self, tool: ClientTool, call_id: str) -> None:
        self.kind = tool.form.call
        self.events = tool.form.streamed and tool.form.streamed[1]
        """Name of the call's events; None if its type has none."""
        self._tool = tool
        self._call_id = call_id
        self._arguments = list[str]()
        self._input = _InputText() if tool.form is FORMS["custom"] else None

    @property
    def is_whole(self) -> bool:
        """Whether the arguments are complete."""
        return arguments_of("".join(self._arguments)) is not None

    def opened(self) -> Item:
        """Fields of the item before its arguments."""
        form, fields = self._tool.form, {"call_id": self._call_id}
        if form.streamed is None:
            return {**fields, **form.fields({})}
        space = {} if self._tool.namespace is None else {"namespace": self._tool.namespace}
        return {**fields, "name": self._tool.name, form.streamed[0]: "", **space}

    def feed(self, arguments: str) -> str:
        """Add a piece of the arguments, and return the delta for the stream."""
        self._arguments.append(arguments)
        if self._input is not None:
            return self._input.feed(arguments)
        return "" if self.events is None else arguments

    def close(self) -> tuple[Item, str]:
        """End the call. Returns its final fields, and the last delta."""
        arguments = "".join(self._arguments)
        if self._input is not None:
            given = self._tool.form.fields(decoded(arguments))["input"]
            seen = self._input.text
            text = given if given.startswith(seen) else seen
            return {"input": text}, text[len(seen) :]
        if self.events is not None:
            return {"arguments": arguments}, ""
        return self._tool.form.fields(decoded(arguments)), ""

    def done(self, item: Item) -> dict[str, Any]:
        """The call's field in its last event."""
        streamed = self._tool.form.streamed
        return {} if streamed is None else {streamed[0]: item[streamed[0]]}


class _InputText:
    """Reads the text of `{"input": "..."}` while it arrives. Arguments in another format are read at their end."""

    def __init__(self) -> None:
        self.text = ""
        self._held = ""
        self._is_in = False
        self._is_over = False

    def feed(self, piece: str) -> str:
        """Return the new characters of the text, up to an incomplete escape."""
        if self._is_over:
            return ""
        self._held += piece
        if not self._is_in:
            start = _INPUT.match(self._held)
            if start is None:
                self._is_over = len(self._held) > _START_CHARS
                return ""
            self._is_in, self._held = True, self._held[start.end() :]
        found = _WHOLE.match(self._held)
        whole = "" if found is None else found.group()
        self._is_over = self._held[len(whole) : len(whole) + 1] == '"'
        self._held = self._held[len(whole) :]
        try:
            new: str = msgspec.json.decode(f'"{whole}"', type=str)
        except msgspec.MsgspecError:
            self._is_over, new = True, ""
        self.text += new
        return new
