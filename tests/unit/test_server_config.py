"""Settings of `vllm-lite serve`: an engine's settings and the server's own, in one layering."""

import argparse
import socket
from pathlib import Path
from typing import Any

import pytest

from vllm_lite.config import EngineConfig
from vllm_lite.errors import ConfigError
from vllm_lite.runtime.settings import add_flags
from vllm_lite.server import config as config_module
from vllm_lite.server.config import ServeConfig
from vllm_lite.server.processes.serve import bind


def parsed(*arguments: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_flags(parser, ServeConfig)
    return vars(parser.parse_args(arguments))


def load(*arguments: str, env: dict[str, str] | None = None, file: Path | None = None) -> ServeConfig:
    return ServeConfig.load(parsed(*arguments), env or {}, file)


def test_flags_of_both_kinds() -> None:
    config = load("--port", "9", "--max-model-len", "1k", "--max-request-bytes", "2M", "--no-enable-prefix-caching")
    assert (config.port, config.max_model_len, config.max_request_bytes) == (9, 1000, 2 * 2**20)
    engine = config.engine()
    assert type(engine) is EngineConfig
    assert (engine.max_model_len, engine.enable_prefix_caching) == (1000, False)


def test_the_parser_name_none_selects_no_parser(tmp_path: Path) -> None:
    """As a flag, in the environment and in a file. Without the setting the parser is detected."""
    file = tmp_path / "serve.yaml"
    file.write_text("tool-call-parser: none\nreasoning-parser: none\n")
    flags = ["--tool-call-parser", "none", "--reasoning-parser", "none"]
    env = {"VLLM_LITE_TOOL_CALL_PARSER": "none", "VLLM_LITE_REASONING_PARSER": "none"}
    for config in (load(*flags), load(env=env), load(file=file)):
        assert (config.tool_call_parser, config.reasoning_parser) == ("none", "none")
    assert (load().tool_call_parser, load().reasoning_parser) == ("auto", "auto")


@pytest.mark.parametrize(("given", "meant"), [("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16")])
def test_types_have_other_names(given: str, meant: str) -> None:
    assert load("--dtype", given).dtype == meant


@pytest.mark.parametrize("words", [["a", "b"], ["a,b"], ["a b"]])
def test_several_names(words: list[str]) -> None:
    config = load("--served-model-name", *words)
    assert config.names == ("a", "b")
    assert config.engine().served_model_name == "a"
    assert load().names == ()
    assert load().engine().served_model_name is None


def test_several_keys(tmp_path: Path) -> None:
    """A flag takes one, so that it cannot take the model for another."""
    file = tmp_path / "keys"
    file.write_text("# of the team\nthree\n\n four \n")
    assert load("--api-key", "one", "--api-key", "two").keys().user == ("one", "two")
    assert load("--api-key", "5k").keys().user == ("5k",)
    assert load("--api-key", "one", "--api-key-file", str(file)).keys().user == ("one", "three", "four")
    assert load(env={"VLLM_LITE_API_KEY": "one,two"}).keys().user == ("one", "two")
    assert load(env={"VLLM_API_KEY": "five"}).keys().user == ("five",)
    assert load(env={"VLLM_API_KEY": "five", "VLLM_LITE_API_KEY": "one"}).keys().user == ("one",)
    assert load("--api-key", "one", env={"VLLM_API_KEY": "five"}).keys().user == ("one",)
    assert load().keys().user == ()


def test_keys_of_admins(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\ufeffthree\r\n")  # as editors of Windows write it
    config = load("--api-key", "one", "--admin-api-key", "two", "--admin-api-key-file", str(file))
    assert config.keys() == (("one",), ("two", "three"))
    assert "two" not in config.to_yaml()
    with pytest.raises(ConfigError, match="admin_api_key_file"):
        load("--admin-api-key-file", "/no/such/file").keys()


@pytest.mark.parametrize(
    ("flags", "local"),
    [
        ([], True),
        (["--host", "localhost"], True),
        (["--host", "::1"], True),
        (["--host", "127.8.8.8"], True),
        (["--host", "0.0.0.0"], False),
        (["--host", "mybox"], True),
        (["--host", "example.org"], False),
        (["--host", "unknown"], False),
        (["--host", "::"], False),
        (["--host", "0.0.0.0", "--uds", "/s"], True),
    ],
)
def test_addresses_that_others_can_reach(flags: list[str], local: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is where it resolves to, as when the server listens there."""
    found = {"mybox": "127.0.1.1", "example.org": "203.0.113.7"}

    def resolved(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if host not in found:
            raise socket.gaierror
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (found[host], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    config_module.address_of.cache_clear()
    assert load(*flags).is_local is local
    config_module.address_of.cache_clear()


def test_one_process_is_one_server() -> None:
    with pytest.raises(ConfigError, match="api_server_count is 2"):
        load("--single-process", "--api-server-count", "2")


@pytest.mark.parametrize("text", ["", "# nothing\n"])
def test_a_file_without_keys_does_not_open_the_server(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match="holds no key"):
        load("--api-key-file", str(file)).keys()


@pytest.mark.parametrize("words", ['["https://a", "https://b"]', "https://a,https://b"])
def test_origins(words: str) -> None:
    assert load("--allowed-origins", words).allowed_origins == ("https://a", "https://b")


def test_a_file_with_lists(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("served_model_name: [a, b]\napi_key: [one, two]\nallowed_origins: ['*']\n")
    config = load(file=file)
    assert (config.names, config.keys().user, config.allowed_origins) == (("a", "b"), ("one", "two"), ("*",))


def test_printed_settings_can_be_read_again_and_have_no_key(tmp_path: Path) -> None:
    config = load("--api-key", "secret", "--port", "7", "--allowed-origins", "*", "--served-model-name", "a", "b")
    file = tmp_path / "settings.yaml"
    file.write_text(config.to_yaml())
    assert "secret" not in config.to_yaml()
    again = load(file=file)
    assert again.to_yaml() == config.to_yaml()
    assert (again.port, again.names, again.allowed_origins) == (7, ("a", "b"), ("*",))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--port", "70000"], "port"),
        (["--port", "x"], "port"),
        (["--shutdown-timeout", "-1"], "shutdown_timeout"),
        (["--generation-config", "x"], "auto, vllm"),
        (["--api-server-count", "0"], "api_server_count"),
        (["--max-num-queued-tokens", "0"], "max_num_queued_tokens"),
        (["--ssl-certfile", "x"], "ssl_keyfile"),
        (["--model", "x", "--block-size", "3"], "block_size"),
    ],
)
def test_wrong_values(arguments: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(*arguments)


def test_an_engine_knows_nothing_of_ports() -> None:
    with pytest.raises(ConfigError, match="port"):
        EngineConfig.check({"port": 1})


def test_a_blank_key_opens_nothing() -> None:
    """A variable that was left blank is a mistake, not a server for everybody."""
    with pytest.raises(ConfigError, match="api_key is empty"):
        load(env={"VLLM_LITE_API_KEY": ""})


@pytest.mark.parametrize("host", ["300.1.1.1", "192.0.2.1"])
def test_a_host_that_is_not_this_machine(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"^cannot listen on {host}:0: .*; choose another --host$"):
        bind(ServeConfig.load({"host": host, "port": 0}, env={}))


@pytest.mark.parametrize("flag", ["--served-model-name", "--api-key", "--chat-template", "--model"])
def test_bytes_that_are_no_text_are_refused(flag: str) -> None:
    name = flag.removeprefix("--").replace("-", "_")
    with pytest.raises(ConfigError, match=rf"^{name} must be valid UTF-8, got 'a.udcff'$"):
        load(flag, "a\udcff")
