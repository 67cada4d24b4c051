"""PoolingCall: one HTTP request for vectors or scores."""

from vllm_lite.client.pooling import PoolingStream
from vllm_lite.server.calls.list_call import ListCall, Window
from vllm_lite.server.calls.style import AnswerStyle


class PoolingCall(ListCall[PoolingStream]):
    """A call whose texts are pooled."""

    def __init__(self, call_id: str, model: str, num_texts: int, window: Window, owner: str = "") -> None:
        super().__init__(call_id, AnswerStyle("embd", model), num_texts, window, owner)
