"""Answers with vectors and scores: their format, the pieces in which they are built, and the limits of a request."""

import base64
import json
import struct
import threading
from array import array
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from starlette.responses import Response, StreamingResponse

from vllm_lite.client.pooling import PoolingStream, joined
from vllm_lite.client.prompt import Prompt
from vllm_lite.client.windows import TextPart
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.pooling import PoolerInfo, Pooling, PoolingTask
from vllm_lite.server.calls import list_call
from vllm_lite.server.calls.list_call import Window
from vllm_lite.server.openai.errors import ApiError
from vllm_lite.server.pooling import answers
from vllm_lite.server.pooling import call as call_module
from vllm_lite.server.pooling.bodies import MAX_NUMBER_BYTES
from vllm_lite.server.pooling.call import PoolingCall
from vllm_lite.server.pooling.encodings import Encoding
from vllm_lite.server.pooling.runs import PoolingRuns

Item = Callable[[int, PoolingStream], Iterable[bytes]]


def call_of(task: PoolingTask, num_texts: int, num_tokens: int, size: int) -> PoolingCall:
    """A call that has ended; each text has numbers of its own."""
    call = PoolingCall("call", "m[]", num_texts, Window(8, 64))
    for index in range(num_texts):
        stream = PoolingStream(f"s{index}", Prompt(None, [1] * num_tokens), SamplingParams(), Pooling(task))
        count = size * num_tokens if task == "token_embed" else size
        stream.data = array("f", (index + place / 4 for place in range(count))).tobytes()
        call.add([stream])
    return call


async def sent(response: Response) -> list[bytes]:
    if not isinstance(response, StreamingResponse):
        return [bytes(response.body)]

    async def read() -> list[bytes]:
        return [bytes(piece) async for piece in response.body_iterator]  # type: ignore[arg-type]

    return await read()


async def answered(call: PoolingCall, item: Item, name: str = "data") -> tuple[Any, list[bytes]]:
    pieces = await sent(answers.answer(call, {}, answers.fields(call, "m[]"), item, name))
    return json.loads(b"".join(pieces)), pieces


async def test_windows_are_joined_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def seen(streams: list[PoolingStream]) -> PoolingStream:
        threads.append(threading.current_thread())
        return joined(streams)

    monkeypatch.setattr(call_module, "joined", seen)
    call, whole = call_of("embed", 3, 2, 5), Prompt(None, [1] * 3)
    for stream in call.streams:
        stream.finished = True
    for stream, is_last in zip(call.streams[:2], (False, True), strict=True):
        stream.part = TextPart(whole, slice(0, 2), is_last)
    await call.join()
    assert threading.main_thread() not in threads
    assert (len(threads), call.num_texts, call.finished) == (2, 2, True)
    assert call.num_prompt_tokens == 3 + 2
    await call.join()
    assert len(threads) == 2, "nothing is left to be joined"


@pytest.mark.parametrize(
    ("clock_s", "passed_s", "is_late"), [(100.9, 0.4, False), (100.9, 0.6, True), (-9e9, 0.6, True)]
)
async def test_a_deadline_ignores_the_clock_on_the_wall(
    monkeypatch: pytest.MonkeyPatch, clock_s: float, passed_s: float, is_late: bool
) -> None:
    """The wall clock may be set at any time; the answer has its whole seconds as `created`."""
    clock = SimpleNamespace(time=lambda: 100.9, monotonic=lambda: 7.0)
    monkeypatch.setattr(list_call, "time", clock)
    call = PoolingCall("call", "m[]", 1, Window(8, 64))
    call.add([PoolingStream("s", Prompt(None, [1]), SamplingParams(deadline_ms=500), Pooling("embed"))])
    clock.time, clock.monotonic = (lambda: clock_s), (lambda: 7.0 + passed_s)
    assert call.is_late is is_late


@pytest.mark.parametrize("num_texts", [1, 3, 40])
@pytest.mark.parametrize("as_base64", [False, True])
async def test_vectors(num_texts: int, as_base64: bool) -> None:
    call = call_of("embed", num_texts, 2, 5)
    found, _ = await answered(call, partial(answers.embedding, encoding=Encoding() if as_base64 else None))
    assert (found["model"], found["usage"]["prompt_tokens"], list(found)[-1]) == ("m[]", 2 * num_texts, "data")
    for index, (each, stream) in enumerate(zip(found["data"], call.streams, strict=True)):
        vector = base64.b64encode(stream.data).decode() if as_base64 else stream.numbers()
        assert each == {"object": "embedding", "index": index, "embedding": vector}
    plain, _ = await answered(call, answers.vector, "embeddings")
    assert plain["embeddings"] == [stream.numbers() for stream in call.streams]


async def test_vectors_as_bytes_say_where_each_begins() -> None:
    call = call_of("embed", 2, 2, 3)
    response = answers.binary_answer(call, {"Warning": "w"}, Encoding("float16", "big"), model="m")
    data = b"".join(await sent(response))
    metadata = json.loads(response.headers["metadata"])
    assert (response.headers["warning"], response.media_type) == ("w", "application/octet-stream")
    assert (metadata["model"], metadata["usage"]["prompt_tokens"]) == ("m", 4)
    for index, (place, stream) in enumerate(zip(metadata["data"], call.streams, strict=True)):
        assert place == {
            "index": index,
            "embed_dtype": "float16",
            "endianness": "big",
            "start": 6 * index,
            "end": 6 * index + 6,
            "shape": [3],
        }
        assert list(struct.unpack(">3e", data[place["start"] : place["end"]])) == stream.numbers()
    tokens = answers.binary_answer(call_of("token_embed", 1, 4, 3), {}, Encoding(), model="m")
    assert json.loads(tokens.headers["metadata"])["data"][0]["shape"] == [4, 3]
    assert "metadata" not in answers.binary_answer(call, {}, Encoding(), model=None).headers


def test_vectors_of_bits_are_as_numpy_packs_them() -> None:
    call = call_of("embed", 2, 1, 16)
    for stream in call.streams:
        stream.data = array("f", [number - 2 for number in stream.numbers()]).tobytes()
    found = json.loads(b"".join(answers.typed(call, ["float", "binary", "ubinary", "base64"])))
    vectors = np.array([stream.numbers() for stream in call.streams])
    assert found["float"] == vectors.tolist()
    assert found["ubinary"] == np.packbits(vectors >= 0, axis=-1).tolist()
    assert found["binary"] == (np.packbits(vectors >= 0, axis=-1).astype(int) - 128).tolist()
    assert [base64.b64decode(each) for each in found["base64"]] == [stream.data for stream in call.streams]


async def test_labels() -> None:
    found, _ = await answered(call_of("classify", 2, 2, 3), partial(answers.classification, labels=("a", "b", "c")))
    assert found["data"][1] == {"index": 1, "label": "c", "probs": [1.0, 1.25, 1.5], "num_classes": 3}


@pytest.mark.parametrize("as_base64", [False, True])
async def test_a_vector_for_each_of_many_tokens_is_made_in_small_pieces(as_base64: bool) -> None:
    """4 MiB of numbers at once would be 32 of Python's, and 0.2 s of the loop."""
    call = call_of("token_embed", 1, 4096, 256)
    found, pieces = await answered(call, partial(answers.pooled, encoding=Encoding() if as_base64 else None))
    data = found["data"][0]["data"]
    if as_base64:
        assert base64.b64decode(data) == call.streams[0].data
    else:
        assert data == list(call.streams[0].rows())
        assert (len(data), data[1][:2]) == (4096, [64.0, 64.25])
    assert max(map(len, pieces)) < 3 * answers.PIECE_BYTES


@pytest.mark.parametrize(
    ("task", "num_tokens", "size", "dimensions", "most"),
    [("embed", 9, 1 << 20, 0, 16), ("embed", 9, 1 << 20, 1 << 19, 32), ("token_embed", 4, 1 << 20, 0, 4)],
)
def test_the_numbers_in_one_answer_are_limited(
    task: PoolingTask, num_tokens: int, size: int, dimensions: int, most: int
) -> None:
    assert MAX_NUMBER_BYTES == 4 * 16 * (1 << 20)
    factory: Any = SimpleNamespace(limits=SimpleNamespace(pooler=PoolerInfo(size=size)))
    generation: Any = SimpleNamespace()
    runs = PoolingRuns(generation, factory, Window(8, 64), {})
    call = PoolingCall("call", "m", 99, Window(8, 64))
    for count in range(1, most + 2):
        prompt = Prompt(None, [1] * num_tokens)
        call.add([PoolingStream(f"s{count}", prompt, SamplingParams(), Pooling(task, dimensions))])
        if count <= most:
            runs.check_size(call)
    with pytest.raises(ApiError, match="over the 67108864 bytes that a request gets; send fewer texts in one"):
        runs.check_size(call)


def test_numbers_for_labels_are_few() -> None:
    factory: Any = SimpleNamespace(limits=SimpleNamespace(pooler=PoolerInfo(size=1 << 30)))
    generation: Any = SimpleNamespace()
    PoolingRuns(generation, factory, Window(8, 64), {}).check_size(call_of("classify", 40, 2, 2))
