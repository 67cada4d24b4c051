"""Models by hub ids, against a hub on this machine: what is fetched, what is not, and what is said if it cannot be."""

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.deadlines import scaled
from tests.fakes import DEADLINE_S
from tests.hub_stub import COMMIT, Hub, hub
from vllm_lite.checkpoint import hub as ours
from vllm_lite.checkpoint.hub import HubSource, is_hub_id, local_folder, remote_headers
from vllm_lite.checkpoint.tensors.headers import INDEX_FILE, Tensor, read_headers
from vllm_lite.client.engines.launch import resolve
from vllm_lite.client.streams.stream import load_tokenizer
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.config import EngineConfig, demo_folder
from vllm_lite.errors import EngineError, ModelError

DEMO = Path(demo_folder())
SOURCE = HubSource("org/model")
NEVER_FETCHED = {"pytorch_model.bin": b"x", "model.pt": b"x", "modeling_evil.py": b"x", "README.md": b"x"}


class _Impatient:
    """The clock for huggingface_hub, which tries again five times, ever later."""

    def __getattr__(self, name: str) -> object:
        return getattr(time, name)

    def sleep(self, _: float) -> None:
        pass


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the demo model and with files that are never needed, an empty cache, no token."""
    from huggingface_hub import constants

    with hub() as running:
        running.add_folder(DEMO)
        running.files |= NEVER_FETCHED
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", running.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
        monkeypatch.setattr("huggingface_hub.utils._http.time", _Impatient())
        monkeypatch.chdir(tmp_path)
        yield running


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def names(folder: str | Path) -> set[str]:
    return {file.name for file in Path(folder).iterdir()}


def test_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("org/model")
    assert is_hub_id("Org-1/model.v2_x")
    assert is_hub_id("org/model:Q4_K_M")
    for name in ("model", "/org/model", "./org/model", "../org/model", "a/b/c", "org/", "~/model", "org/..", "demo"):
        assert not is_hub_id(name), name
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert not is_hub_id("org/model"), "a local folder wins"
    assert local_folder(SOURCE) == str(tmp_path / "org" / "model")


@pytest.mark.parametrize(
    "name", ["hf.co/org/model:Q4", "https://huggingface.co/org/model:Q4", "hf.co/org/model:Q4/tree/main"]
)
def test_the_address_of_a_page_is_answered_with_the_id(name: str) -> None:
    """As browsers show it, and as Ollama and llama.cpp take it."""
    with pytest.raises(ModelError, match=r"a model of the hub is given by its id, org/model:Q4$"):
        local_folder(HubSource(name))


def test_only_needed_files_are_downloaded_once(stub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = local_folder(SOURCE)
    assert Path(folder).name == COMMIT
    assert names(folder) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert (Path(folder) / "model.safetensors").read_bytes() == (DEMO / "model.safetensors").read_bytes()
    assert stub.fetched() == names(folder)
    stub.requests.clear()
    assert local_folder(SOURCE) == folder
    assert stub.requests == ["HEAD /org/model/resolve/main/config.json"]
    stub.requests.clear()
    offline(monkeypatch)
    assert local_folder(SOURCE) == folder
    assert stub.requests == []


def test_other_tokenizers_are_downloaded_where_there_is_no_tokenizer_json(stub: Hub) -> None:
    others = dict.fromkeys(["tokenizer.model", "tekken.json", "vocab.json", "merges.txt", "spiece.model"], b"x")
    templates = {"additional_chat_templates/tool_use.jinja": b"x", "chat_template.jinja": b"x"}
    stub.files |= others | templates | {"tokenizer.py": b"x", "model.bin": b"x"}
    folder = Path(local_folder(SOURCE))
    assert (folder / "additional_chat_templates" / "tool_use.jinja").read_bytes() == b"x"
    assert not names(folder) & others.keys()
    shutil.rmtree(folder.parents[1])
    stub.requests.clear()
    del stub.files["tokenizer.json"]
    assert names(local_folder(SOURCE)) >= {*others, "chat_template.jinja"}
    assert not stub.fetched() & {"tokenizer.py", "model.bin"}
    assert names(local_folder(SOURCE, what="config")) >= {"config.json"}


def test_shards_match_the_index(stub: Hub) -> None:
    weights = stub.files.pop("model.safetensors")
    shards = {"model-1.safetensors": weights[:100], "model-2.safetensors": weights[100:]}
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    stub.files |= shards | {INDEX_FILE: json.dumps(index).encode(), "consolidated.safetensors": b"the same again"}
    assert names(local_folder(SOURCE)) >= {INDEX_FILE, *shards}
    assert "consolidated.safetensors" not in stub.fetched()


def test_an_index_cannot_leave_its_folder(stub: Hub) -> None:
    del stub.files["model.safetensors"]
    stub.files[INDEX_FILE] = json.dumps({"weight_map": {"a": "../../x.safetensors"}}).encode()
    with pytest.raises(ModelError, match=r"'../../x\.safetensors'; it must be a \.safetensors file in the same folder"):
        local_folder(SOURCE)


def test_the_engine_gets_a_folder_and_the_name(stub: Hub, tmp_path: Path) -> None:
    given = {"model": "org/model", "tokenizer": "org/model", "download_dir": str(tmp_path / "mine"), "revision": "main"}
    resolved = resolve(EngineConfig.check(given))
    assert resolved.model.startswith(str(tmp_path / "mine"))
    assert Path(resolved.model).is_dir()
    assert resolved.tokenizer == resolved.model
    assert resolved.served_model_name == "org/model"
    assert resolve(EngineConfig.check({**given, "served_model_name": "me"})).served_model_name == "me"


def test_a_tokenizer_needs_no_weights(stub: Hub) -> None:
    folder = local_folder(SOURCE, what="tokenizer")
    assert "tokenizer.json" in names(folder)
    assert "model.safetensors" not in stub.fetched()
    assert "model.safetensors" in names(local_folder(SOURCE)), "it is not taken for the whole model"


def test_an_adapter_may_be_named_by_its_hub_id(stub: Hub, tmp_path: Path) -> None:
    stub.files |= {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x" * 9, "adapter_model.bin": b"x"}
    given = {"model": str(DEMO), "enable_lora": True, "lora_modules": ["a=org/model", f"b={tmp_path}"]}
    modules = resolve(EngineConfig.check(given | {"download_dir": str(tmp_path / "mine")})).lora_modules
    assert [(module.name, module.path) for module in modules] == [("a", modules[0].path), ("b", str(tmp_path))]
    assert names(Path(modules[0].path)) == {"adapter_config.json", "adapter_model.safetensors"}
    assert modules[0].path.startswith(str(tmp_path / "mine"))
    del stub.files["adapter_config.json"]
    with pytest.raises(ModelError, match=r"^org/model has no adapter_config\.json; it holds "):
        local_folder(HubSource("org/model", None, str(tmp_path / "other")), what="adapter")


def test_a_client_may_name_a_tokenizer_by_its_hub_id(stub: Hub) -> None:
    tokenizer = load_tokenizer("org/model", "/no/such/folder")
    assert tokenizer is not None
    assert tokenizer.vocab_size == Tokenizer.load(DEMO).vocab_size


def test_headers_without_weights(stub: Hub) -> None:
    folder = local_folder(SOURCE, what="config")
    assert names(folder) == {"config.json", "generation_config.json"}
    found = remote_headers(SOURCE)
    assert found == read_headers(DEMO)
    assert isinstance(next(iter(found.values())), Tensor)


def test_the_token_is_sent_and_a_revision_is_asked_for(stub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert Path(local_folder(HubSource("org/model", COMMIT))).name == COMMIT
    assert stub.tokens == {"Bearer hf_secret"}
    with pytest.raises(ModelError, match=r"^org/model has no revision 'v2'; give --revision a branch"):
        local_folder(HubSource("org/model", "v2"))


@pytest.mark.parametrize(
    ("refusal", "text"),
    [
        ((404, "RepoNotFound"), r"^org/model: there is no such folder here, and no such model at http.* set HF_TOKEN"),
        ((401, None), r"^org/model: there is no such folder here, .* set HF_TOKEN"),
        ((403, "GatedRepo"), r"^org/model is gated: ask for access at http.*/org/model, and set HF_TOKEN to a token"),
        ((500, None), r"^org/model: http.* answered with status 500; try again later$"),
    ],
)
def test_refusals_are_one_sentence(stub: Hub, refusal: tuple[int, str | None], text: str) -> None:
    stub.refuse = refusal
    with pytest.raises(ModelError, match=text) as caught:
        local_folder(SOURCE)
    assert "\n" not in str(caught.value)


def test_missing_files_of_a_repository_are_named(stub: Hub, tmp_path: Path) -> None:
    del stub.files["model.safetensors"]
    with pytest.raises(ModelError, match=r"^org/model has no model\.safetensors .* holds .*pytorch_model\.bin"):
        local_folder(SOURCE)
    del stub.files["config.json"]
    with pytest.raises(ModelError, match=r"^org/model has no config\.json; it holds .*tokenizer\.json"):
        local_folder(HubSource("org/model", None, str(tmp_path / "empty")))


def test_offline_and_not_there(stub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    offline(monkeypatch)
    with pytest.raises(ModelError, match=r"^org/model is not in the cache \(.*cache\) and HF_HUB_OFFLINE is set"):
        local_folder(SOURCE)
    assert stub.requests == []


def test_offline_with_half_of_it(stub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(local_folder(SOURCE))
    offline(monkeypatch)
    (folder / "tokenizer.json").unlink()
    assert local_folder(SOURCE) == str(folder), "it can be served with token ids"
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"^org/model is not complete in the cache \(.*\) and HF_HUB_OFFLINE is set"):
        local_folder(SOURCE)


def test_a_hub_that_is_not_reached(stub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    folder = local_folder(SOURCE)
    nowhere = "http://127.0.0.1:9"
    monkeypatch.setattr(constants, "ENDPOINT", nowhere)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", nowhere + "/{repo_id}/resolve/{revision}/{filename}")
    assert local_folder(SOURCE) == folder, "what is cached is used"
    shutil.rmtree(Path(folder).parents[1])
    with pytest.raises(ModelError, match=rf"^org/model is not in the cache, and {nowhere} cannot be reached \(Connect"):
        local_folder(SOURCE)


class _Connecting:
    """Replaces socket.create_connection: records the addresses, and calls `result`."""

    def __init__(self, result: Callable[[], Any]) -> None:
        self.asked: list[tuple[tuple[str, int], float]] = []
        self._result = result

    def __call__(self, address: tuple[str, int], timeout: float, **_: Any) -> Any:
        self.asked.append((address, timeout))
        return self._result()


def no_name() -> None:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_without_a_network_nothing_is_tried_again(stub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    connecting, slept = _Connecting(no_name), list[float]()
    monkeypatch.setattr(socket, "create_connection", connecting)
    monkeypatch.setattr(_Impatient, "sleep", lambda _, time_s: slept.append(time_s))
    monkeypatch.setattr(constants, "ENDPOINT", "https://huggingface.co")
    with pytest.raises(
        ModelError, match=r"^org/model is not in the cache, and https://huggingface\.co cannot be reached"
    ):
        local_folder(SOURCE)
    with pytest.raises(ModelError, match=r"cannot be reached \(gaierror: .*; check the network$"):
        remote_headers(SOURCE)
    assert connecting.asked == [(("huggingface.co", 443), ours.REACH_S)] * 2
    assert not slept
    assert stub.requests == []
    assert ours.REACH_S < 3


def test_without_a_network_cached_files_are_used_at_once(stub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(local_folder(SOURCE))
    stub.requests.clear()
    monkeypatch.setattr(socket, "create_connection", _Connecting(no_name))
    assert local_folder(SOURCE) == str(folder)
    assert stub.requests == []
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        ModelError, match=r"^org/model is not complete in the cache \(.*\) and http.* cannot be reached"
    ):
        local_folder(SOURCE)


def test_a_name_that_is_never_resolved_ends_with_a_sentence(stub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(socket, "create_connection", _Connecting(lambda: released.wait(DEADLINE_S)))
    monkeypatch.setattr(ours, "REACH_S", 0.05)
    try:
        with pytest.raises(ModelError, match=r"cannot be reached \(TimeoutError: no connection within 0\.05 s\)"):
            local_folder(SOURCE)
    finally:
        released.set()
    assert stub.requests == []


@pytest.mark.parametrize(
    ("proxy", "address"),
    [("http://proxy:3128", ("proxy", 3128)), ("proxy", ("proxy", 80)), ("socks5://proxy", ("proxy", 1080))],
)
def test_behind_a_proxy_the_proxy_is_reached(
    stub: Hub, monkeypatch: pytest.MonkeyPatch, proxy: str, address: tuple[str, int]
) -> None:
    connecting = _Connecting(no_name)
    monkeypatch.setattr(socket, "create_connection", connecting)
    monkeypatch.setenv("http_proxy", proxy)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with pytest.raises(ModelError, match="cannot be reached"):
        local_folder(SOURCE)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(ModelError, match="cannot be reached"):
        local_folder(SOURCE)
    there = urlsplit(stub.url)
    assert [asked for asked, _ in connecting.asked] == [address, (there.hostname, there.port)]


def test_a_full_disk(stub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")  # noqa: PYI024
    monkeypatch.setattr("vllm_lite.checkpoint.hub.shutil.disk_usage", lambda _: usage(1000))
    with pytest.raises(ModelError, match=r"^org/model needs 0\.0 GiB and .*cache has 0\.0 GiB free; .* --download-dir"):
        local_folder(SOURCE)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", full)
    with pytest.raises(ModelError, match=r"^org/model: the disk is full; free some of it"):
        local_folder(SOURCE)


def test_where_one_file_failed_no_other_is_begun(stub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    fetch = huggingface_hub.hf_hub_download
    begun: list[str] = []
    released = threading.Event()

    def fail_first(repo: str, name: str, **more: Any) -> str:
        if name == "config.json":
            return str(fetch(repo, name, **more))
        begun.append(name)
        if name == begun[0]:
            raise PermissionError(errno.EACCES, "not allowed", name)
        released.wait(DEADLINE_S)
        return ""

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail_first)
    monkeypatch.setattr(ours, "NUM_THREADS", 2)
    with pytest.raises(ModelError, match="cannot be written"):
        local_folder(SOURCE)
    released.set()
    for thread in threading.enumerate():
        if thread.name == "hub":
            thread.join(DEADLINE_S)
    assert len(begun) <= 2


def test_a_download_ends_when_it_is_not_wanted_and_continues_later(stub: Hub) -> None:
    stub.stall.set()
    ended: list[BaseException] = []

    def download() -> None:
        try:
            local_folder(SOURCE, stub.stalled.is_set)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=download)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert isinstance(ended[0], EngineError)
    assert str(ended[0]) == "stopped while org/model was being downloaded"
    stub.stall.clear()
    stub.released.set()
    folder = Path(local_folder(SOURCE))
    assert (folder / "model.safetensors").read_bytes() == (DEMO / "model.safetensors").read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_serve_during_a_download(stub: Hub, tmp_path: Path, number: signal.Signals) -> None:
    stub.stall.set()
    environment = {**os.environ, "HF_ENDPOINT": stub.url, "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "vllm_lite", "serve", "org/model", "--port", "0"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert stub.stalled.wait(DEADLINE_S)
            process.send_signal(number)
            assert process.wait(DEADLINE_S) == 0
            assert process.stderr is not None
            assert "downloading org/model: 5." in process.stderr.read()
        finally:
            process.kill()
    assert (tmp_path / "home" / "hub").is_dir(), "HF_HOME is honoured"


def test_a_folder_needs_no_hub() -> None:
    program = (
        "import sys; from vllm_lite.client.engines.launch import resolve; from vllm_lite.config import EngineConfig;"
        "resolve(EngineConfig()); sys.exit('huggingface_hub' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=scaled(60)).returncode == 0
    assert ours.is_hub_id("org/model")


def gguf_repository(stub: Hub, *names: str) -> None:
    stub.files = {name: b"GGUF" + name.encode() for name in (*names, "README.md")}


def test_a_gguf_model_is_chosen_by_its_label(stub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf_repository(stub, "m-Q8_0.gguf", "m-Q4_K_M.gguf", "mmproj-m-Q8_0.gguf", "tokenizer.json")
    path = Path(local_folder(HubSource("org/model:q4_k_m")))
    assert path.name == "m-Q4_K_M.gguf"
    assert path.read_bytes() == b"GGUFm-Q4_K_M.gguf"
    assert stub.fetched() == {"m-Q4_K_M.gguf", "tokenizer.json"}
    stub.requests.clear()
    assert local_folder(HubSource("org/model:Q4_K_M")) == str(path)
    assert stub.fetched() == set(), "it is in the cache"
    offline(monkeypatch)
    assert local_folder(HubSource("org/model:Q4_K_M")) == str(path)
    with pytest.raises(ModelError, match=r"has no GGUF models Q8_0; give one as ORG/MODEL:LABEL: m-Q4_K_M.gguf"):
        local_folder(HubSource("org/model:Q8_0"))
    with pytest.raises(ModelError, match=r"has no GGUF file in the cache .* HF_HUB_OFFLINE is set; unset it"):
        local_folder(HubSource("org/other:Q8_0"))


def test_the_parts_of_a_gguf_model_are_fetched_together(stub: Hub) -> None:
    parts = [f"Q8/m-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2)]
    gguf_repository(stub, *parts, "m-Q4_0.gguf")
    assert local_folder(HubSource("org/model:Q8_0")).endswith(parts[0])
    assert stub.fetched() == {part.removeprefix("Q8/") for part in parts}
    del stub.files[parts[1]]
    with pytest.raises(
        ModelError, match=r"org/model:Q8_0 lacks Q8/m-Q8_0-00002-of-00002.gguf, which is one of 2 parts"
    ):
        local_folder(HubSource("org/model:Q8_0"))


def test_a_label_that_is_missing_or_means_several_is_one_sentence(stub: Hub) -> None:
    gguf_repository(stub, "m-Q4_K_M.gguf", "m-UD-Q4_K_M.gguf")
    with pytest.raises(ModelError, match=r"has no GGUF models Q8_0; .*: m-Q4_K_M.gguf, m-UD-Q4_K_M.gguf"):
        local_folder(HubSource("org/model:Q8_0"))
    with pytest.raises(ModelError, match="has 2 GGUF models Q4_K_M"):
        local_folder(HubSource("org/model:Q4_K_M"))
    assert local_folder(HubSource("org/model:UD-Q4_K_M")).endswith("m-UD-Q4_K_M.gguf")
    with pytest.raises(ModelError, match="org/model has several GGUF models"):
        local_folder(SOURCE)
    gguf_repository(stub)
    with pytest.raises(ModelError, match=r"org/model:Q8_0 has no GGUF files; it holds README.md"):
        local_folder(HubSource("org/model:Q8_0"))
    gguf_repository(stub, "only.gguf")
    assert local_folder(SOURCE).endswith("only.gguf")
    gguf_repository(stub, "m-Q8_0.gguf", "config.json")
    stub.files["config.json"] = b"{}"
    with pytest.raises(ModelError, match=r"has its weights in GGUF files; give one as ORG/MODEL:LABEL: m-Q8_0.gguf"):
        local_folder(SOURCE)
