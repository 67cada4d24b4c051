"""The text of a field that streams: what is certain goes out, and white space at both ends of the whole does not."""


class Flow:
    """Collects the parts of one text. `is_blank` until it has something else than white space."""

    def __init__(self) -> None:
        self.is_blank = True
        self._parts: list[str] = []
        self._space = ""  # read, and sent as soon as something follows it
        self._join: str | None = None  # stands between two parts instead of the white space there

    def begin(self, join: str | None) -> None:
        """A new region begins; `join` stands between it and the text before."""
        if join is not None and not self.is_blank:
            self._join, self._space = join, ""

    def write(self, text: str, *, strip: bool = True) -> None:
        if not strip:
            self._parts.append(self._space + text)
            self._space = ""
            self.is_blank = self.is_blank and not text.strip()
            return
        if text.isspace():
            if not self.is_blank and self._join is None:
                self._space += text
            return
        if not text:
            return
        if self.is_blank or self._join is not None:
            text = text.lstrip()
        kept = text.rstrip()
        self._parts.append(self._space + (self._join or "") + kept)
        self._space, self._join, self.is_blank = text[len(kept) :], None, False

    def take(self) -> str:
        text = "".join(self._parts)
        self._parts = []
        return text

    def forget(self) -> None:
        """What was written so far was the prompt's."""
        self._parts, self._space = [], ""
