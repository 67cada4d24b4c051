"""All sources of settings accept the same: flags, the file of --config, the environment, and keywords of LLM.

Each flag that `serve` accepts is given through all of them and has the same effect, whether it is a setting, has no
effect or is refused. vLLM's own variables are included.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.deadlines import scaled
from vllm_lite.config import EngineConfig
from vllm_lite.errors import ConfigError
from vllm_lite.protocol.params import MAX_LOGPROBS
from vllm_lite.runtime import vllm_variables
from vllm_lite.runtime.settings import Settings, flag_of
from vllm_lite.runtime.vllm_settings import REFUSED, WITHOUT_EFFECT, Flags, answer, known
from vllm_lite.server.config import ServeConfig
from vllm_lite.server.route_table import ROUTES
from vllm_lite.server.router.config import RouterConfig
from vllm_lite.tools.cli import Parser, main, serve, with_dashes

VARIABLES_OF_VLLM = Path(__file__).parents[1] / "fixtures" / "vllm_variables.txt"
"""All variables of vLLM 0.33 that begin with VLLM_, with spaces between them."""

NOT_SETTINGS = {"--help", "--config", "--print-config"}
"""Flags of the command, of which there is nothing to set."""
VALUES = {
    "--models-memory": "2GiB",
    "--model": "/m",
    "--model-tag": "/m",
    "--root-path": "/llm",
    "--address": "ipc:///tmp/socket",
    "--tcp-address": "tcp://127.0.0.1:5555",
    "--lora-modules": "a=/b",
    "--cudagraph-capture-sizes": "1,2",
    "--cuda-graph-sizes": "1,2",
    "--cudagraph-piece-sizes": "64",
    "--kv-cache-memory-bytes": "4k",
    "--block-size": "32",
    "--served-model-name": "n",
    "--port": "9",
    "--hf-overrides": '{"a": {"b": 1}}',
    "--default-chat-template-kwargs": '{"a": true}',
    "--reasoning-effort-map": '{"low": "high"}',
    "--speculative-config": '{"method": "ngram"}',
    "--kv-events-config": '{"topic": "t"}',
    "--pooler-config": '{"normalize": false}',
    "--override-pooler-config": '{"normalize": false}',
    "--override-generation-config": '{"temperature": 0.5}',
    "--generation-config": "vllm",
    "--scheduling-policy": "priority",
}
"""Values of flags for which the usual one, 2 or the last of a fixed set, would be invalid or would change nothing."""


class Flag(NamedTuple):
    name: str
    value: str | None
    """None: a flag without value."""

    @property
    def words(self) -> list[str]:
        return [self.name] if self.value is None else [f"{self.name}={self.value}"]


def write(folder: Path, text: str, suffix: str = "yaml") -> Path:
    file = folder / f"settings.{suffix}"
    file.write_text(text)
    return file


@cache
def parser_of_serve() -> Parser:
    parser = Parser(allow_abbrev=False)
    serve.add_flags(parser)
    return parser


def accepted() -> Iterator[Flag]:
    """Every long flag of `serve`, with a value that it may have."""
    for name, action in parser_of_serve()._option_string_actions.items():
        if name.startswith("--") and name not in NOT_SETTINGS:
            row = getattr(action, "_row", None)
            if action.nargs == 0:
                yield Flag(name, None)
            elif isinstance(row, Flags):
                yield Flag(name, row.values[0] if row.values else "1")
            else:
                fixed = re.fullmatch(r"\{(.*)\}", str(action.metavar))
                yield Flag(name, VALUES.get(name) or (fixed[1].split(",")[-1] if fixed else "2"))


def loaded(words: list[str], env: Mapping[str, str], file: Path | None) -> tuple[str, list[str]]:
    """The settings that come of it, or what is said against them, and the notices; without the names of doors."""
    arguments = parser_of_serve().parse_args([with_dashes(word) for word in words]) if words else None
    flags = {name: getattr(arguments, name, None) for name in RouterConfig.__struct_fields__}
    of_vllm, notices = getattr(arguments, "of_vllm", ()), list[str]()
    try:
        config = RouterConfig.load(flags, env, file, of_vllm=of_vllm, notice=notices.append)
    except ConfigError as error:
        return plain(str(error)), []
    return repr(config), [plain(text) for text in notices]


def plain(text: str) -> str:
    """`text` with flags, keys and variables written in one way."""
    text = re.sub(r" \(VLLM_LITE_\w+\)$", "", text).replace("VLLM_LITE_", "--")
    return re.sub(r"--[\w.-]+|\b[a-z0-9]+(?:[_-][a-z0-9]+)+\b", lambda word: word[0].strip("-").lower(), text).replace(
        "-", "_"
    )


def doors(flag: Flag, folder: Path) -> Iterator[tuple[str, dict[str, str], Path | None]]:
    """(name, environment, file) of each other door through which `flag` can be given."""
    name, value = flag.name[2:], json.dumps(True if flag.value is None else flag.value)
    yield f"{name} in YAML", {}, write(folder, f"{name}: {value}\n")
    name = name.replace("-", "_")
    yield f"{name} in TOML", {}, write(folder, f'"{name}" = {value}\n', "toml")
    if "." not in flag.name:  # no variable has a dot in its name
        variable = "VLLM_LITE_" + name.upper()
        yield variable, {variable: flag.value or "1"}, None


def opposite(name: str) -> str:
    return f"--{name[5:]}" if name.startswith("--no-") else f"--no-{name[2:]}"


def test_every_flag_is_read_from_file_and_environment(tmp_path: Path) -> None:
    flags = list(accepted())
    assert {"--port", "--no-enable-lora", "--trust-remote-code", "--no-trust-remote-code", "--grpc-port"} <= {
        flag.name for flag in flags
    }
    assert len(flags) > 450
    nothing, without_effect, wrong = loaded([], {}, None), [], []
    for flag in flags:
        expected = loaded(flag.words, {}, None)
        without_effect += [flag.name] * (expected == nothing)
        wrong += [door for door, env, file in doors(flag, tmp_path) if loaded([], env, file) != expected]
    assert wrong == []
    shown = {flag.name for flag in flags} - {*without_effect}
    assert [name for name in without_effect if opposite(name) not in shown] == [], "these values show nothing"


def test_shown_commands_give_the_same_settings() -> None:
    wrong = []
    adapters = ["--enable-lora", "--lora-modules", "a=/b c", '{"name": "d", "path": "e", "base_model_name": "f"}']
    for words in [*(flag.words for flag in accepted()), adapters, ["--served-model-name", "it's"]]:
        arguments = parser_of_serve().parse_args(words)
        flags = {name: getattr(arguments, name, None) for name in RouterConfig.__struct_fields__}
        with suppress(ConfigError):
            config = RouterConfig.load(flags, {})
            shown = [word for item in config.changed().items() for word in shlex.split(flag_of(*item))]
            wrong += [(words, shown)] * (loaded(shown, {}, None)[0] != repr(config))
    assert wrong == []


# ---- as files have it


def load(text: str, tmp_path: Path, suffix: str = "yaml", env: Mapping[str, str] | None = None) -> ServeConfig:
    return ServeConfig.load(env=env or {}, file=write(tmp_path, text, suffix))


@pytest.mark.parametrize("text", ["a: 1\nb: 2\na: 3\n", "b: {a: 1, c: {x: 1}, a: 2}\n", '"a": 1\na: 1\n'])
def test_a_key_that_is_given_twice_is_an_error(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^config file '.*' cannot be read: 'a' is given twice, in lines? \d"):
        load(text, tmp_path)


@pytest.mark.parametrize(("text", "suffix"), [("port: 9", "yaml"), ("port = 9", "toml")])
def test_a_byte_order_mark_is_not_part_of_a_name(text: str, suffix: str, tmp_path: Path) -> None:
    assert load(f"\ufeff{text}\r\n", tmp_path, suffix).port == 9


def test_a_key_twice_in_toml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: Cannot overwrite a value"):
        load("port = 1\nport = 2\n", tmp_path, "toml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max-num-seqs: 1\nmax_num_seqs: 2\n", "max-num-seqs and max_num_seqs are one setting; give one of them"),
        ("kv-offloading-size: 1\nswap-space: 2\n", "kv-offloading-size and swap-space are one setting"),
        ("enable_lora: true\nno-enable-lora: true\n", "enable_lora and no-enable-lora are one setting"),
        ("speculative-config: {method: ngram}\nspeculative-config.method: ngram\n", "are one setting"),
        ("speculative-config: null\nspeculative-config.method: ngram\n", "are one setting"),
    ],
)
def test_two_names_of_one_setting(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        load(text, tmp_path)


def test_merged_keys_may_be_given_again(tmp_path: Path) -> None:
    text = "hf_overrides: {a: &a {x: 1, y: 2}, b: {<<: *a, x: 3}}\n"
    assert load(text, tmp_path).hf_overrides == {"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 2}}


@pytest.mark.parametrize(
    "text", ["speculative-config.num-speculative-tokens: 3", "speculative_config: {num_speculative_tokens: 3}"]
)
def test_keys_of_an_object(text: str, tmp_path: Path) -> None:
    config = load(text, tmp_path)
    assert config.speculative_config is not None
    assert config.speculative_config.num_speculative_tokens == 3


def test_keys_of_an_object_deep_down(tmp_path: Path) -> None:
    assert load("hf-overrides.a.b: 1\nhf-overrides.a.c: 2\n", tmp_path).hf_overrides == {"a": {"b": 1, "c": 2}}
    assert load("[hf-overrides]\na.b = 1\n", tmp_path, "toml").hf_overrides == {"a": {"b": 1}}


def test_one_key_of_vllms_structured_outputs_config_is_accepted(tmp_path: Path) -> None:
    notices: list[str] = []
    for text in ("structured-outputs-config: {backend: xgrammar}", "structured-outputs-config.backend: xgrammar"):
        ServeConfig.load(env={}, file=write(tmp_path, text), notice=notices.append)
    assert len(set(notices)) == 1
    assert "structured-outputs-config.backend (there is one backend" in notices[0]
    with pytest.raises(ConfigError, match=r"^structured-outputs-config of vLLM is not supported"):
        load("structured-outputs-config: {backend: xgrammar, disable_any_whitespace: true}", tmp_path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "pipeline-parallel-size: 2",
            "pipeline-parallel-size can only be 1 here: layers are not shared out; use -tp; got '2'",
        ),
        ("enable-log-outputs: true", "enable-log-outputs of vLLM is not supported: answers are not logged"),
        ("trust-remote-code: perhaps", "trust-remote-code: must be true or false, got 'perhaps'"),
        ("no-enable-lora: 3", "no-enable-lora: must be true or false, got 3"),
        ("no-port: true", "unknown setting 'no_port'"),
    ],
)
def test_invalid_files_are_refused(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="^" + re.escape(says)):
        load(text, tmp_path)


@pytest.mark.parametrize("text", ["enable-log-outputs: false", "hf-token:", "no-enable-log-outputs: true"])
def test_refused_settings_may_be_switched_off(text: str, tmp_path: Path) -> None:
    load(text, tmp_path)


# ---- as the environment has it


def notices_of(env: Mapping[str, str], kind: type[Settings] = ServeConfig) -> list[str]:
    notices: list[str] = []
    kind.load(env=env, notice=notices.append)
    return notices


def test_unknown_variables_are_named() -> None:
    env = {"VLLM_LITE_MAX_NUM_SEQ": "3", "VLLM_LITE_ISA": "avx2", "VLLM_LITE_QQQQQQQQQQ": "1"}
    assert notices_of(env) == [
        "VLLM_LITE_MAX_NUM_SEQ is not read; did you mean VLLM_LITE_MAX_NUM_SEQS?",
        "VLLM_LITE_QQQQQQQQQQ is not read",
    ]


def test_variables_that_kubernetes_makes_of_a_service_are_not_settings() -> None:
    """A service that is called vllm-lite, or vllm."""
    env = {
        "VLLM_LITE_PORT": "tcp://10.0.0.1:8000",
        "VLLM_LITE_SERVICE_HOST": "10.0.0.1",
        "VLLM_LITE_SERVICE_PORT_HTTP": "8000",
        "VLLM_LITE_PORT_8000_TCP_ADDR": "10.0.0.1",
        "VLLM_PORT": "tcp://10.0.0.1:8000",
        "VLLM_LITE_TCP_ADDRESS": "tcp://10.0.0.1:8000",
        "VLLM_LITE_INSECURE": "1",
    }
    assert notices_of(env) == []
    assert ServeConfig.load(env=env).port == 8000
    assert ServeConfig.load(env=env).tcp_address == "tcp://10.0.0.1:8000", "this one is a setting"
    assert ServeConfig.load(env={"VLLM_LITE_PORT": "9"}).port == 9


def test_an_error_names_the_variable() -> None:
    with pytest.raises(ConfigError, match=r"^block_size must be one of .*, got 3 \(VLLM_LITE_BLOCK_SIZE\)$"):
        EngineConfig.load(env={"VLLM_LITE_BLOCK_SIZE": "3"})
    with pytest.raises(ConfigError, match=r"got 'x' \(VLLM_LITE_KV_OFFLOADING_SIZE\)$"):
        EngineConfig.load(env={"VLLM_LITE_KV_OFFLOADING_SIZE": "x"})
    with pytest.raises(ConfigError, match=r"got '-3' \(VLLM_ENGINE_READY_TIMEOUT_S\)$"):
        EngineConfig.load(env={"VLLM_ENGINE_READY_TIMEOUT_S": "-3"})
    with pytest.raises(ConfigError, match=r"got 5$"):
        EngineConfig.load({"block_size": 5}, {"VLLM_LITE_BLOCK_SIZE": "3"})


# ---- vLLM's variables


def test_every_variable_of_vllm_has_one_answer() -> None:
    rows = [row for table in (vllm_variables.WITHOUT_EFFECT, vllm_variables.REFUSED) for row in table]
    for name in VARIABLES_OF_VLLM.read_text().split():
        own = [row for row in rows if any(vllm_variables.is_named(pattern, name) for pattern in row.names.split())]
        assert len(own) + (name in vllm_variables.TAKEN) == 1, name


@pytest.mark.parametrize("name", VARIABLES_OF_VLLM.read_text().split())
def test_every_vllm_variable_is_applied_reported_or_refused(name: str) -> None:
    found = vllm_variables.find(name)
    if name in vllm_variables.TAKEN:
        assert found is None
        assert notices_of({name: "1"} if name != "VLLM_LOGGING_LEVEL" else {name: "DEBUG"}) == []
    elif found is not None and found[1]:
        with pytest.raises(ConfigError, match=f"^{name} of vLLM is not supported: "):
            ServeConfig.load(env={name: "3"})
        assert [name in text for text in notices_of({name: "0"})] == [True]
    else:
        [text] = notices_of({name: "1"})
        assert text.startswith(f"without effect here: {name} (")


@pytest.mark.parametrize(
    ("env", "setting", "value"),
    [
        ({"VLLM_CPU_KVCACHE_SPACE": "40"}, "cpu_kvcache_space", 40.0),
        ({"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_LITE_TENSOR_PARALLEL_SIZE": "2"}, "cpu_kvcache_space", 8.0),
        ({"VLLM_CPU_KVCACHE_SPACE": "0"}, "cpu_kvcache_space", None),
        ({"VLLM_CPU_KVCACHE_SPACE": ""}, "cpu_kvcache_space", None),
        ({"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_LITE_CPU_KVCACHE_SPACE": "1"}, "cpu_kvcache_space", 1.0),
        ({"VLLM_CPU_OMP_THREADS_BIND": "0-31|32-63"}, "cpu_bind", "0-31|32-63"),
        ({"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, "cpu_bind", "none"),
        ({"VLLM_BATCH_INVARIANT": "1"}, "deterministic", True),
        ({"VLLM_BATCH_INVARIANT": "0"}, "deterministic", False),
        ({"VLLM_LOGGING_LEVEL": "DEBUG"}, "log_level", "debug"),
        ({"VLLM_LOGGING_LEVEL": "CRITICAL"}, "log_level", "error"),
        ({"VLLM_LOGGING_CONFIG_PATH": "/a.json"}, "log_config_file", "/a.json"),
        ({"VLLM_LOG_STATS_INTERVAL": "2.5"}, "log_stats_interval_s", 2.5),
        ({"VLLM_LOG_STATS_INTERVAL": "-1"}, "log_stats_interval_s", 10.0),
        ({"VLLM_ENGINE_READY_TIMEOUT_S": "60"}, "ready_timeout_s", 60.0),
    ],
)
def test_variables_of_vllm_that_are_settings(env: dict[str, str], setting: str, value: object) -> None:
    """An engine that a script starts reads them as well."""
    assert getattr(ServeConfig.load(env=env), setting) == value
    assert getattr(EngineConfig.load(env=env), setting) == value


def test_vllms_variables_rank_between_the_file_and_ours(tmp_path: Path) -> None:
    file, env = write(tmp_path, "ready_timeout_s: 1\n"), {"VLLM_ENGINE_READY_TIMEOUT_S": "2"}
    assert EngineConfig.load(None, env, file).ready_timeout_s == 2
    assert EngineConfig.load({"ready_timeout_s": 3}, env, file).ready_timeout_s == 3
    assert EngineConfig.load(None, env | {"VLLM_LITE_READY_TIMEOUT_S": "4"}, file).ready_timeout_s == 4
    assert ServeConfig.load(env={"VLLM_HTTP_MAX_REQUEST_BODY_SIZE": "5"}).max_request_bytes == 5
    assert EngineConfig.load(env={"VLLM_HTTP_MAX_REQUEST_BODY_SIZE": "5"}) == EngineConfig()


def test_a_number_of_engines_of_one_asks_for_nothing() -> None:
    assert len(notices_of({"VLLM_DP_SIZE": "1", "VLLM_RAY_PER_WORKER_GPUS": "1.0"})) == 1
    with pytest.raises(ConfigError, match=r"^VLLM_DP_SIZE of vLLM is not supported: see --data-parallel-size"):
        ServeConfig.load(env={"VLLM_DP_SIZE": "2"})


# ---- what is answered is true


def test_the_limit_of_logprobs_is_told() -> None:
    assert known()["max_logprobs"][0].reason == f"up to {MAX_LOGPROBS} may be asked for"


def test_the_hash_of_blocks_is_told() -> None:
    """The hash of runtime/prefix_hash.py."""
    text = answer(parser_of_serve().parse_args(["--prefix-caching-hash-algo", "sha256"]).of_vllm)
    assert "BLAKE2b, 256 bits over the raw token ids" in text


def test_settings_that_an_answer_names_exist() -> None:
    flags = parser_of_serve()._option_string_actions
    tables = (WITHOUT_EFFECT, REFUSED, vllm_variables.WITHOUT_EFFECT, vllm_variables.REFUSED)
    named = {flag for table in tables for row in table for flag in re.findall(r"(?<!\w)--?[a-z][\w-]*", row.reason)}
    assert {flag for flag in named if flag not in flags} <= {"-dp", "-tp"} & set(flags)
    routes = {
        route for table in tables for row in table for route in re.findall(r"(?:POST|GET) (/[\w/{}]+)", row.reason)
    }
    assert routes
    assert routes <= {re.sub(r"{\w+}", "{id}", route.path) for route in ROUTES}


# ---- the command


def test_serve_names_settings_without_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    file = write(tmp_path, "uvicorn-log-level: info\nmodel_tag: /from/file\nmedia-io-kwargs: {image: 2}\n")
    monkeypatch.setenv("VLLM_LITE_TRUST_REMOTE_CODE", "1")
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    assert main(["serve", "--config", str(file), "--max-logprobs", "9", "--print-config"]) == 0
    out, err = capsys.readouterr()
    assert "model: /from/file\n" in out
    assert "cpu_kvcache_space: 2.0\n" in out
    [line] = err.splitlines()
    assert line.startswith("vllm-lite: without effect here: uvicorn-log-level (uvicorn's settings")
    for name in ("media-io-kwargs (", "VLLM_LITE_TRUST_REMOTE_CODE (", "VLLM_USE_DEEP_GEMM (", "--max-logprobs ("):
        assert name in line


def test_serve_refuses_unsupported_variables(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    assert main(["serve", "--print-config"]) == 2
    assert capsys.readouterr().err.startswith("vllm-lite: VLLM_USE_MODELSCOPE of vLLM is not supported: models come")


def test_files_are_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    """Read as Latin-1, a name in a config would be another one, and a chat with an emoji could not be saved."""
    config, talk = tmp_path / "config.yaml", tmp_path / "talk.json"
    config.write_text("served_model_name: Łódź\n", encoding="utf-8")
    program = f"""
from pathlib import Path
from vllm_lite.runtime.settings_sources import read_file
from vllm_lite.tools.chat.conversation import Conversation
assert read_file(Path({str(config)!r})) == {{"served_model_name": "\\u0141\\u00f3d\\u017a"}}
talk, other = Conversation("\\U0001f98a"), Conversation()
talk.save({str(talk)!r})
other.load({str(talk)!r})
assert other.system == talk.system
"""
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", program], env={**os.environ, **locale}, check=True, timeout=scaled(30))
