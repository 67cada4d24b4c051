"""The text of a field that streams: what is certain goes out, and white space at both ends of the whole does not."""

from vllm_lite.client.text.response.events import Events
from vllm_lite.client.text.response.pieces import ReasoningDelta, TextDelta


class Flow:
    """Adds the parts of one text to `events`. `is_blank` until it has something else than white space."""

    def __init__(self, events: Events, kind: type[ReasoningDelta] | type[TextDelta]) -> None:
        self.is_blank = True
        self._events = events
        self._kind = kind
        self._space = ""  # read, and added as soon as something follows it
        self._join: str | None = None  # stands between two parts instead of the white space there

    def begin(self, join: str | None) -> None:
        """A new region begins; `join` stands between it and the text before."""
        if join is not None and not self.is_blank:
            self._join, self._space = join, ""

    def write(self, text: str, *, strip: bool = True) -> None:
        """Add `text`, of which white space at the end waits. Without `strip` all of it is added as it is."""
        if not text:
            return
        if not strip:
            self._events.add_text(self._kind, self._space + text)
            self._space = ""
            self.is_blank = self.is_blank and text.isspace()
            return
        if text.isspace():
            if not self.is_blank and self._join is None:
                self._space += text
            return
        if self.is_blank or self._join is not None:
            text = text.lstrip()
        kept = text.rstrip()
        self._events.add_text(self._kind, self._space + (self._join or "") + kept)
        self._space, self._join, self.is_blank = text[len(kept) :], None, False

    def forget_space(self) -> None:
        """Drop the white space at the end of the text so far, which belongs to the prompt."""
        self._space = ""
