"""Events: what is certain of an output, in the order in which it was written."""

from vllm_lite.client.text.response.pieces import CallDelta, Event, ReasoningDelta, TextDelta


class Events:
    """Collects parts of reasoning, content and calls. Parts of the same thing that follow each other are one event."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._kind: type[ReasoningDelta | TextDelta] | None = None  # None: the open event is of a call
        self._parts: list[str] = []
        self._index = 0
        self._name: str | None = None

    def add_text(self, kind: type[ReasoningDelta] | type[TextDelta], text: str) -> None:
        """Add to the reasoning or to the content; `text` is not empty."""
        if kind is not self._kind:
            self._flush()
            self._kind = kind
        self._parts.append(text)

    def begin_call(self, index: int, name: str) -> None:
        """Begin a call, whose arguments follow."""
        self._flush()
        self._kind, self._index, self._name = None, index, name

    def add_arguments(self, text: str) -> None:
        """Add to the arguments of the call that began last."""
        if self._kind is not None:
            self._flush()
            self._kind = None
        self._parts.append(text)

    def take(self) -> list[Event]:
        """Return the events since the last time."""
        self._flush()
        events, self._events = self._events, []
        return events

    def _flush(self) -> None:
        if not self._parts and self._name is None:
            return
        text = "".join(self._parts)
        self._parts = []
        if self._kind is not None:
            self._events.append(self._kind(text))
        elif text or self._name is not None:
            self._events.append(CallDelta(self._index, self._name, text))
            self._name = None
