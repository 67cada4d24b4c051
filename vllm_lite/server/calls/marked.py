"""MarkedWriter: writes a resumable stream, each event with its stream position as its id."""

from vllm_lite.client.outputs import CompletionOutput
from vllm_lite.server.calls.call import Call, Choice
from vllm_lite.server.calls.place import StreamPosition
from vllm_lite.server.openai.chunks import AnswerWriter
from vllm_lite.server.openai.errors import ApiError


class MarkedWriter:
    """Writes the events of `writer` from a position on. An error ends the stream as its closing does."""

    ping = AnswerWriter.ping

    def __init__(self, writer: AnswerWriter, call: Call, last_event_id: str = "") -> None:
        """`last_event_id` is the client's position, "" if it has received nothing. Raises ApiError for a position that
        the stream has not reached."""
        self._writer = writer
        self._opening = writer.opening()
        self.place = StreamPosition.read(last_event_id, call, len(self._opening))
        for choice, shown in zip(call.choices, self.place.choices, strict=True):
            if shown.num_tokens or shown.has_ended:
                writer.skip(choice, choice.part(shown))

    def opening(self) -> list[bytes]:
        events = []
        for event in self._opening[self.place.num_opened :]:
            self.place.num_opened += 1
            events.append(self.place.mark(event))
        return events

    def chunk(self, choice: Choice, delta: CompletionOutput) -> bytes:
        event = self._writer.chunk(choice, delta)
        self.place.choices[choice.index].add(delta)
        return self.place.mark(event) if event else b""

    def closing(self) -> list[bytes]:
        *usage, done = self._writer.closing()
        events = [self._ending(1, event) for event in usage if not self.place.closing]
        return [*events, self._ending(2, done)]

    def failure(self, error: ApiError) -> bytes:
        return self._ending(2, self._writer.failure(error))

    def whole(self) -> bytes:
        return self._writer.whole()

    def _ending(self, closing: int, event: bytes) -> bytes:
        self.place.closing = closing
        return self.place.mark(event)
