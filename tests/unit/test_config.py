"""EngineConfig: layers, conversions and bounds; every error names the setting, the value and valid ones."""

import argparse
from pathlib import Path
from typing import Any

import msgspec
import pytest

from vllm_lite.checkpoint.sizing import configured_num_blocks
from vllm_lite.config import BLOCK_SIZES, EngineConfig, ResolvedConfig
from vllm_lite.errors import ConfigError
from vllm_lite.runtime import machine
from vllm_lite.runtime.addresses import check_address, split_tcp
from vllm_lite.runtime.kv_dtypes import KVShape
from vllm_lite.runtime.machine import memory_limit_bytes
from vllm_lite.runtime.settings import add_flags


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def parse_flags(*argv: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_flags(parser, EngineConfig)
    return vars(parser.parse_args(argv))


# ---- layers


def test_defaults_need_nothing() -> None:
    assert EngineConfig.load(env={}) == EngineConfig()


def test_file_env_flag_in_this_order(tmp_path: Path) -> None:
    file = write(tmp_path, "a.yaml", "max_num_seqs: 1\nblock_size: 8\nmax_model_len: 100\n")
    env = {"VLLM_LITE_MAX_NUM_SEQS": "2", "VLLM_LITE_BLOCK_SIZE": "32"}
    config = EngineConfig.load({"max_num_seqs": 3}, env, file)
    assert (config.max_num_seqs, config.block_size, config.max_model_len) == (3, 32, 100)
    assert EngineConfig.load(None, env, file).max_num_seqs == 2
    assert EngineConfig.load(None, {}, file).max_num_seqs == 1


def test_an_unset_flag_shows_the_layers_below() -> None:
    flags = parse_flags("--block-size", "32")
    config = EngineConfig.load(flags, {"VLLM_LITE_MAX_NUM_SEQS": "2", "VLLM_LITE_ENABLE_PREFIX_CACHING": "false"})
    assert (config.block_size, config.max_num_seqs, config.enable_prefix_caching) == (32, 2, False)


def test_environment_is_read_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LITE_SEED", "17")
    assert EngineConfig.load().seed == 17


def test_foreign_environment_is_left_alone() -> None:
    assert EngineConfig.load(env={"VLLM_BLOCK_SIZE": "8", "BLOCK_SIZE": "8", "HOME": "/x"}) == EngineConfig()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "max-num-seqs: 5\nmodel: /m\n"),
        ("a.yml", "max_num_seqs: '5'\nmodel: /m\n"),
        ("a.toml", 'max_num_seqs = 5\nmodel = "/m"\n'),
    ],
)
def test_file_formats(tmp_path: Path, name: str, text: str) -> None:
    config = EngineConfig.load(env={}, file=write(tmp_path, name, text))
    assert (config.max_num_seqs, config.model) == (5, "/m")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.json", "{}", "ends in .yaml, .yml or .toml"),
        ("a.yaml", "[1, 2]", "name: value"),
        ("a.yaml", "{", "cannot be read"),
        ("a.yaml", 'model: "a\n', r"cannot be read: found unexpected end of stream at line 2, column 1$"),
        ("a.yaml", "a: b: c", r"cannot be read: mapping values are not allowed in this context at line 1, column 5$"),
        ("a.yaml", "a: *b", r"cannot be read: found undefined alias at line 1, column 4$"),
        ("a.yaml", "a: \x07", r"cannot be read: .*control characters"),
        ("a.toml", "=", "cannot be read"),
        ("a.toml", "\udcff", "cannot be read"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, text: str, says: str) -> None:
    file = tmp_path / name
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=says) as info:
        EngineConfig.load(env={}, file=file)
    assert str(file) in str(info.value)
    assert "\n" not in str(info.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"/nowhere/a\.yaml"):
        EngineConfig.load(env={}, file="/nowhere/a.yaml")


# ---- names


@pytest.mark.parametrize(
    ("name", "meant"), [("max_model_length", "max_model_len"), ("blocksize", "block_size"), ("Model", "model")]
)
def test_an_unknown_name_gets_the_nearest_one(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown setting '{name}'; did you mean '{meant}'"):
        EngineConfig.check({name: 1})


def test_an_unknown_name_like_no_other() -> None:
    with pytest.raises(ConfigError, match=r"^unknown setting 'zzzzz'$"):
        EngineConfig.check({"zzzzz": 1})


def test_an_unknown_name_in_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'block_size'"):
        EngineConfig.load(env={}, file=write(tmp_path, "a.yaml", "block-sise: 8\n"))


# ---- values


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("32k", 32_000),
        ("32K", 32_768),
        ("1.5k", 1_500),
        ("1m", 10**6),
        ("1M", 2**20),
        ("0.5K", 512),
        ("77", 77),
        (77, 77),
    ],
)
def test_integers_may_carry_a_suffix(written: str | int, value: int) -> None:
    assert EngineConfig.check({"max_model_len": written}).max_model_len == value


@pytest.mark.parametrize("name", ["model", "tokenizer", "served_model_name", "prefix_hash_seed"])
def test_a_name_that_looks_like_a_size_stays_a_name(name: str) -> None:
    assert getattr(EngineConfig.check({name: "7M"}), name) == "7M"


@pytest.mark.parametrize("value", ["", " ", [""]])
def test_an_empty_served_name_is_refused(value: Any) -> None:
    """As one of a variable of a shell that is not set."""
    with pytest.raises(ConfigError, match=r"^served_model_name is empty"):
        EngineConfig.check({"served_model_name": value})


def test_a_folder_is_no_config_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory$"):
        EngineConfig.load(env={}, file=tmp_path)


@pytest.mark.parametrize(("written", "value"), [("true", True), ("1", True), ("false", False), ("0", False)])
def test_switches(written: str, value: bool) -> None:
    assert EngineConfig.load(env={"VLLM_LITE_ENABLE_PREFIX_CACHING": written}).enable_prefix_caching is value


def test_none_unsets_a_lower_layers_value(tmp_path: Path) -> None:
    file = write(tmp_path, "a.yaml", "max_model_len: 100\n")
    assert EngineConfig.load(env={"VLLM_LITE_MAX_MODEL_LEN": "none"}, file=file).max_model_len is None


@pytest.mark.parametrize("size", BLOCK_SIZES)
def test_block_sizes(size: int) -> None:
    assert EngineConfig.check({"block_size": size}).block_size == size


BAD_VALUES = [
    ("block_size", 12),
    ("block_size", 0),
    ("block_size", "sixteen"),
    ("max_model_len", 0),
    ("max_model_len", -5),
    ("max_model_len", "1.5"),
    ("max_model_len", "32kk"),
    ("max_model_len", [1]),
    ("num_gpu_blocks_override", 1),
    ("cpu_kvcache_space", 0),
    ("cpu_kvcache_space", "nan"),
    ("kv_watermark", 1),
    ("kv_watermark", -0.1),
    ("max_num_seqs", 0),
    ("max_num_batched_tokens", 0),
    ("max_itl_ms", 0.5),
    ("max_itl_ms", "nan"),
    ("tensor_parallel_size", 0),
    ("tensor_parallel_size", 32),
    ("tensor_parallel_backend", "mpi"),
    ("cpu_threads", 0),
    ("ready_timeout_s", 0),
    ("heartbeat_timeout_s", -1),
    ("dtype", "int8"),
    ("device", "tpu"),
    ("load_format", "pickle"),
    ("log_level", "loud"),
    ("enable_prefix_caching", "perhaps"),
    ("prefix_hash_seed", "x" * 65),
    ("kv_cache_metrics_sample", 0),
    ("seed", -1),
    ("model", 3),
    ("served_model_name", 3),
    ("gpu_memory_utilization", 0),
    ("gpu_memory_utilization", 1.01),
    ("kv_cache_memory_bytes", 0),
    ("kv_cache_dtype", "int4"),
    ("attention_backend", "flash"),
    ("quantization", "int3"),
    ("swap_space", -1),
    ("cudagraph_capture_sizes", "1,0"),
    ("cudagraph_capture_sizes", "1,x"),
    ("cudagraph_capture_sizes", ""),
    ("max_cudagraph_capture_size", 0),
    ("cudagraph_piece_sizes", "64,-1"),
]


@pytest.mark.parametrize(("name", "value"), BAD_VALUES, ids=lambda item: str(item)[:20])
def test_a_bad_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as info:
        EngineConfig.check({name: value})
    assert name in str(info.value)
    assert str(value) in str(info.value)


def test_one_bad_value_among_good_ones_is_the_one_named() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        EngineConfig.check({"block_size": 16, "max_num_seqs": 0, "max_model_len": 5})


def test_configs_are_frozen() -> None:
    with pytest.raises(AttributeError):
        EngineConfig().block_size = 8  # type: ignore[misc]


# ---- addresses


@pytest.mark.parametrize("address", ["ipc:///tmp/a.sock", "inproc://engine", "ipc:///" + "x" * 106])
def test_good_addresses(address: str) -> None:
    assert EngineConfig.check({"address": address}).address == address


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:5555", "/tmp/a.sock", "ipc://", "ipc:/tmp/a", ""])
def test_bad_addresses(address: str) -> None:
    with pytest.raises(ConfigError, match="ipc:///path/to/socket"):
        EngineConfig.check({"address": address})


@pytest.mark.parametrize("path", ["/" + "x" * 107, "/" + "ü" * 54])
def test_an_ipc_path_is_limited_in_bytes(path: str) -> None:
    with pytest.raises(ValueError, match=r"at most 107 bytes, got (108|109)"):
        check_address("ipc://" + path)


@pytest.mark.parametrize(
    "address",
    ["0.0.0.0:5555", "tcp://localhost:5555", "tcp://*:5555", "tcp://1.2.3.4", "tcp://1.2.3.4:0", "tcp://:5555"],
)
def test_bad_tcp_addresses(address: str) -> None:
    with pytest.raises(ConfigError, match=r"tcp_address must look like tcp://IP:PORT, for example .*, got "):
        EngineConfig.check({"tcp_address": address, "insecure": True})


def test_tcp_addresses() -> None:
    assert split_tcp("tcp://0.0.0.0:5555") == ("0.0.0.0", 5555)
    assert split_tcp("tcp://[::1]:65535") == ("::1", 65535)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "needs either curve_keys, .* or insecure, which allows anyone who can reach it; got neither"),
        ({"curve_keys": "/keys", "insecure": True}, "got both"),
        ({"insecure": True, "single_process": True}, "cannot go with single_process"),
    ],
)
def test_tcp_needs_keys_or_an_explicit_word(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.check({"tcp_address": "tcp://127.0.0.1:5555", **settings})
    EngineConfig.check({"tcp_address": "tcp://127.0.0.1:5555", "curve_keys": "/keys"})
    EngineConfig.check({"tcp_address": "tcp://127.0.0.1:5555", "insecure": True})


# ---- flags


def test_every_field_is_a_flag_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        parse_flags("--help")
    assert info.value.code == 0
    shown = capsys.readouterr().out
    for field in msgspec.structs.fields(EngineConfig):
        flag = field.name.replace("_", "-")
        assert f"--{flag}" in shown
        is_negated = isinstance(field.default, bool) and not field.name.startswith("disable_")
        assert (f"--no-{flag}" in shown) == is_negated


def test_flags_reach_the_config() -> None:
    flags = parse_flags("--max-model-len", "4K", "--no-enable-prefix-caching", "--kv-watermark", "0.1", "--model", "1k")
    config = EngineConfig.load(flags, {})
    assert (config.max_model_len, config.enable_prefix_caching, config.kv_watermark) == (4096, False, 0.1)
    assert config.model == "1k"


# ---- resolve


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the GPUs of the machine that runs the tests."""
    monkeypatch.setattr(machine, "GPU_FILES", ())


@pytest.fixture
def gpu(no_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with all that a GPU needs."""
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(machine, "GPU_FILES", (str(tmp_path / "nvidiactl"),))
    monkeypatch.setattr(machine, "version", lambda _name: "2.13.0+cu130")
    monkeypatch.setattr(machine, "find_spec", lambda _name: object())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def resolved(positions: int = 1000, kv: KVShape | None = None, **values: Any) -> ResolvedConfig:
    config = EngineConfig.check(values)
    return config.resolve(max_position_embeddings=positions, dtype="float32", model_path="/m/name", kv=kv)


def test_resolve_leaves_nothing_open() -> None:
    config = resolved()
    assert (config.max_model_len, config.max_num_seqs, config.max_num_batched_tokens) == (1000, 64, 512)
    assert (config.model, config.tokenizer, config.served_model_name) == ("/m/name", "/m/name", "name")
    assert (config.dtype, config.device, config.kv_cache_dtype, config.swap_space) == ("float32", "cpu", "float32", 0)
    assert config.cpu_kvcache_space == pytest.approx(min(4, memory_limit_bytes() / 4 / 2**30))


def test_a_resolved_config_has_all_settings_and_travels() -> None:
    given: dict[str, Any] = {
        "seed": 5,
        "kv_watermark": 0.5,
        "log_level": "error",
        "speculative_config": {"method": "ngram"},
    }
    config = resolved(**given)
    chosen = {"model", "dtype", "kv_cache_dtype", *ResolvedConfig.__annotations__}
    before = EngineConfig.check(given)
    assert before.max_num_seqs is None
    for name in set(EngineConfig.__struct_fields__) - chosen:
        assert getattr(config, name) == getattr(before, name), name
    assert None not in [getattr(config, name) for name in chosen - {"quantization"}]
    sent = msgspec.json.encode(config)
    assert msgspec.json.decode(sent, type=ResolvedConfig) == config
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.json.decode(sent.replace(b'"seed"', b'"sead"'), type=ResolvedConfig)
    with pytest.raises(msgspec.ValidationError, match="missing required field"):
        msgspec.json.decode(msgspec.json.encode(before), type=ResolvedConfig)


class TinyModel:
    """Two groups, and little for each token."""

    kv_groups, kv_cache_dtype = ("full", "sliding"), None

    def kv_block_bytes(self, block_size: int, dtype_bytes: int, tp: int = 1, scale_bytes: int = 0) -> int:
        return 10 * block_size * (dtype_bytes + scale_bytes) // tp


@pytest.mark.parametrize(
    ("given", "num_blocks"),
    [
        ({}, 4 * 64 * 2 * 63),  # 1000 tokens are 63 blocks
        ({"max_num_seqs": 200, "max_model_len": 100, "block_size": 8}, 4 * 200 * 2 * 13),
        ({"kv_cache_dtype": "fp8"}, 4 * 64 * 2 * 63),
        ({"max_num_seqs": 1}, 8192),
        ({"cpu_kvcache_space": 0.5}, None),
    ],
)
def test_a_tiny_model_gets_no_more_kv_cache_than_it_can_use(given: dict[str, Any], num_blocks: int | None) -> None:
    """A tiny model gets no more blocks than its longest sequences can fill, unless the space is given."""
    config = resolved(kv=TinyModel(), device="cpu", **given)
    block_bytes = 10 * config.block_size * (1 if given.get("kv_cache_dtype") else 4)
    wanted = 2**29 // block_bytes if num_blocks is None else num_blocks
    assert configured_num_blocks(config, block_bytes) == wanted


@pytest.mark.parametrize("given", [{"num_gpu_blocks_override": 10**6}, {"kv_cache_memory_bytes": 40 * 16 * 10**6}])
def test_a_size_that_is_asked_for_is_kept(given: dict[str, Any]) -> None:
    config = resolved(kv=TinyModel(), device="cpu", **given)
    assert configured_num_blocks(config, 40 * 16) == 10**6


def test_a_large_model_gets_the_available_memory() -> None:
    class LargeModel(TinyModel):
        def kv_block_bytes(self, block_size: int, dtype_bytes: int, tp: int = 1, scale_bytes: int = 0) -> int:
            return super().kv_block_bytes(block_size, dtype_bytes, tp, scale_bytes) * 10**4

    config = resolved(kv=LargeModel(), device="cpu")
    assert config.cpu_kvcache_space == min(4, memory_limit_bytes() / 4 / 2**30)


@pytest.mark.usefixtures("gpu")
def test_defaults_on_a_gpu() -> None:
    config = resolved()
    assert (config.device, config.max_num_seqs, config.max_num_batched_tokens) == ("cuda", 256, 8192)
    assert (config.swap_space, config.gpu_memory_utilization) == (4.0, 0.9)
    assert resolved(enable_chunked_prefill=False, positions=9000).max_num_batched_tokens == 9000
    on_cpu = resolved(device="cpu")
    assert (on_cpu.device, on_cpu.max_num_seqs, on_cpu.max_num_batched_tokens) == ("cpu", 64, 512)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_swap_space_is_by_device_unless_it_is_said(device: str) -> None:
    assert resolved(device=device).swap_space == {"cpu": 0.0, "cuda": 4.0}[device]
    assert [resolved(device=device, swap_space=size).swap_space for size in (0, 1.5)] == [0, 1.5]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("lacking", "says"),
    [
        (("GPU_FILES", ()), "no NVIDIA driver"),
        (("version", lambda _name: "2.13.0+cpu"), r"torch 2\.13\.0\+cpu is built without CUDA"),
        (("find_spec", lambda _name: None), r"cupy is not installed; install vllm-lite\[cuda1"),
    ],
    ids=["driver", "torch", "cupy"],
)
def test_a_gpu_that_cannot_be_used(
    lacking: tuple[str, Any], says: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(machine, *lacking)
    assert resolved().device == "cpu"
    assert bool(caplog.records) == (lacking[0] != "GPU_FILES"), "a GPU that stays idle is worth a word"
    with pytest.raises(ConfigError, match=f"device is cuda, but .*{says}.*--device cpu"):
        resolved(device="cuda")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("hidden", ["", "-1"])
def test_gpus_that_are_hidden(hidden: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert resolved().device == "cpu"
    assert not caplog.records, "the one who hides it knows"
    with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES .* hides every GPU"):
        resolved(device="cuda")


@pytest.mark.usefixtures("gpu")
def test_the_reference_backend_needs_no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda _name: None)
    assert resolved(device="cuda", attention_backend="reference").device == "cuda"


@pytest.mark.parametrize(
    ("given", "meant"), [("auto", "float32"), ("fp8", "fp8_e4m3"), ("fp8_e5m2", "fp8_e5m2"), ("float16", "float16")]
)
def test_the_cache_type_is_resolved(given: str, meant: str) -> None:
    assert resolved(kv_cache_dtype=given).kv_cache_dtype == meant


@pytest.mark.parametrize("given", ["1,2,8", "1, 2, 8", "1 2 8", [1, 2, 8], (1, 2, 8)], ids=str)
def test_sizes_of_graphs(given: Any) -> None:
    assert EngineConfig.check({"cudagraph_capture_sizes": given}).cudagraph_capture_sizes == (1, 2, 8)
    assert EngineConfig.check({"cudagraph_capture_sizes": "none"}).cudagraph_capture_sizes is None


def test_a_context_that_fits_by_itself() -> None:
    assert EngineConfig.check({"max_model_len": "auto"}).max_model_len is None


def test_other_names_of_a_setting(tmp_path: Path) -> None:
    assert EngineConfig.load(parse_flags("--kv-offloading-size", "2"), {}).swap_space == 2
    assert EngineConfig.load(parse_flags("--cuda-graph-sizes", "4"), {}).cudagraph_capture_sizes == (4,)
    file = write(tmp_path, "a.yaml", "swap_space: 1\n")
    env = {"VLLM_LITE_KV_OFFLOADING_SIZE": "2"}
    assert EngineConfig.load(None, env, file).swap_space == 2
    assert EngineConfig.load({"swap_space": 3}, env, file).swap_space == 3, "the flag wins, whatever it is called"


def test_resolve_keeps_given_values() -> None:
    config = resolved(max_num_seqs=3, max_num_batched_tokens=7, tokenizer="/t", served_model_name="s", max_model_len=9)
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len) == (3, 7, 9)
    assert (config.tokenizer, config.served_model_name) == ("/t", "s")


def test_a_context_longer_than_the_models_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"1000.*1001"):
        resolved(max_model_len=1001)
