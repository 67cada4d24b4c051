"""PoolingCall: one HTTP request for vectors or scores."""

import asyncio

from vllm_lite.client.pooling import PoolingStream, by_text, joined
from vllm_lite.server.calls.list_call import ListCall, Window
from vllm_lite.server.calls.style import AnswerStyle


class PoolingCall(ListCall[PoolingStream]):
    """A call whose texts are pooled."""

    def __init__(self, call_id: str, model: str, num_texts: int, window: Window, owner: str = "") -> None:
        super().__init__(call_id, AnswerStyle("embd", model), num_texts, window, owner)

    def expect(self, num_more: int) -> None:
        """Account for streams beyond one for each text: windows of long ones."""
        self.num_texts += num_more

    async def join(self) -> None:
        """Join the windows of each text into one stream, once all have finished. Tokens that windows share count once.
        The means of vectors are computed in a thread, as they take long in plain Python."""
        if all(stream.part is None for stream in self.streams):
            return
        self.streams = await asyncio.to_thread(lambda: [joined(own) for own in by_text(self.streams)])
        self.num_texts = len(self.streams)
        self._num_tokens = sum(len(stream.prompt.token_ids) for stream in self.streams)
