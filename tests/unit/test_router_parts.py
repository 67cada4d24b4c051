"""The smaller parts of the router: metrics of several models as one text, memory, requests to a socket, keep_alive."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.deadlines import scaled
from vllm_lite.server.config import ServeConfig
from vllm_lite.server.openai.errors import ApiError
from vllm_lite.server.router.catalog import Catalog, Entry
from vllm_lite.server.router.config import RouterConfig
from vllm_lite.server.router.exposition import merged
from vllm_lite.server.router.fleet import Fleet
from vllm_lite.server.router.forward import target_of
from vllm_lite.server.router.known import BASE_BYTES, RANK_BYTES, estimate, files_bytes
from vllm_lite.server.router.memory import tree_bytes
from vllm_lite.server.router.ollama import keep_alive_s
from vllm_lite.server.router.upstream import UpstreamLost, open_answer

TEXT = """# HELP vllm:x_total Xs.
# TYPE vllm:x_total counter
vllm:x_total{model_name="%s"} %d
# HELP vllm:h Hs.
# TYPE vllm:h histogram
vllm:h_bucket{le="+Inf",model_name="%s"} 1
vllm:h_count{model_name="%s"} 1
vllm:h_sum{model_name="%s"} 2
"""


async def test_metrics_of_several_models_are_one_exposition() -> None:
    async def main() -> bytes:
        catalog = Catalog()
        catalog.add(Entry("a", ServeConfig(model="demo")))
        fleet = Fleet(catalog, RouterConfig.check({"models": "x", "models_memory": "1GiB"}), lambda *_: None)
        return merged(fleet, [TEXT % ("a", 1, "a", "a", "a"), TEXT % ("b", 2, "b", "b", "b")])

    text = (await main()).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert text.count("# HELP vllm:x_total ") == text.count("# TYPE vllm:h ") == 1
    assert {sample.labels["model_name"]: sample.value for sample in families["vllm:x"].samples} == {"a": 1, "b": 2}
    assert len(families["vllm:h"].samples) == 6
    states = families["vllm_lite:model_state"].samples
    assert [sample.labels["state"] for sample in states if sample.value] == ["unloaded"]
    assert families["vllm_lite:models_memory_limit_bytes"].samples[0].value == 1 << 30


def test_memory_of_a_tree_counts_its_children() -> None:
    code = "import subprocess,sys;data=b'x'*(40<<20);print(1,flush=True);sys.stdin.read()"
    parent = f"import subprocess,sys;p=subprocess.Popen([sys.executable,'-c',{code!r}]);p.wait()"
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = tree_bytes([process.pid, os.getpid(), 2**22 + 1])
        assert process.stdin is not None
        process.stdin.close()
        process.wait(scaled(30))
    assert found[process.pid] > 40 << 20
    assert found[os.getpid()] > found[process.pid]
    assert found[2**22 + 1] == 0


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (0, 0.0),
        (300, 300.0),
        (-1, None),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("-1", None),
        ("-5m", None),
        ("0", 0.0),
        ("1.5s", 1.5),
        ("100ms", 0.1),
    ],
)
def test_keep_alive(given: str | float, seconds: float | None) -> None:
    assert keep_alive_s(given) == seconds


@pytest.mark.parametrize("given", ["", "5", "soon", "5 m", "m5", "5m3"])
def test_a_keep_alive_that_is_none(given: str) -> None:
    if given == "5":
        assert keep_alive_s(given) == 5.0
        return
    with pytest.raises(ApiError, match="keep_alive must be a number of seconds or like 5m"):
        keep_alive_s(given)


def test_the_target_of_a_request() -> None:
    assert target_of({"path": "/v1/a b/ü", "query_string": b"x=1&y"}) == b"/v1/a%20b/%C3%BC?x=1&y"
    assert target_of({"path": "/v1/\r\nHost: x", "query_string": b""}) == b"/v1/%0D%0AHost:%20x"


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def asked(tmp_path: Path, answer: bytes, *, close: bool = True) -> tuple[int, list[bytes]]:
    """The status and the body's pieces that come of an answer in bytes."""

    async def main() -> tuple[int, list[bytes]]:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"POST /x HTTP/1.1\r\n")
            assert await reader.readexactly(4) == b"body"
            writer.write(answer)
            await writer.drain()
            if not close:
                await reader.read()
            writer.close()
            await writer.wait_closed()

        path = str(tmp_path / "socket")
        async with await asyncio.start_unix_server(handle, path), asyncio.timeout(scaled(10)):
            found = await open_answer(path, "POST", b"/x", [(b"a", b"b")], b"body")
            try:
                return found.status, [piece async for piece in found.pieces()]
            finally:
                found.close()
                await asyncio.sleep(0.01)  # for both ends to be closed before the loop is

    return asyncio.run(main())


def test_an_answer_with_a_length_and_one_in_chunks(tmp_path: Path) -> None:
    assert asked(tmp_path, b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc", close=False) == (200, [b"abc"])
    chunks = b"HTTP/1.1 404 x\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"
    status, pieces = asked(tmp_path, chunks, close=False)
    assert (status, b"".join(pieces)) == (404, b"abc")


@pytest.mark.parametrize(
    "answer",
    [b"", b"HTTP/1.1 200", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabc"],
    ids=["nothing", "half a head", "no HTTP", "half a body"],
)
def test_an_answer_that_is_cut(tmp_path: Path, answer: bytes) -> None:
    with pytest.raises(UpstreamLost):
        asked(tmp_path, answer)


async def test_a_socket_without_a_listener(tmp_path: Path) -> None:
    with pytest.raises(UpstreamLost, match="it does not listen"):
        await open_answer(str(tmp_path / "none"), "GET", b"/", [])


def test_memory_before_a_model_has_been_loaded_counts_weights_as_they_are_held() -> None:
    files = files_bytes("demo")
    assert estimate(ServeConfig(model="demo", dtype="bfloat16")) - BASE_BYTES == pytest.approx(files, rel=0.05)
    assert estimate(ServeConfig(model="demo", dtype="float32")) - BASE_BYTES == pytest.approx(2 * files, rel=0.05)
    assert estimate(ServeConfig(model="demo", quantization="int4_g32")) < BASE_BYTES + 0.7 * files
    assert estimate(ServeConfig(model="demo", tensor_parallel_size=2)) > BASE_BYTES + RANK_BYTES
    assert estimate(ServeConfig(model="demo", data_parallel_size=2)) == 2 * estimate(ServeConfig(model="demo"))
    assert estimate(ServeConfig(model="org/none")) == BASE_BYTES, "nothing is known of it"
    assert estimate(ServeConfig(model="/" + "x" * 300)) == BASE_BYTES, "no file can have such a name"
    assert estimate(None) == 0


def test_files_that_cannot_be_read_are_counted_whole(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 1000)
    assert estimate(ServeConfig(model=str(tmp_path))) == BASE_BYTES + 1000
