"""The models that may be asked for: from files and folders, with a fault in one of them."""

from pathlib import Path
from typing import Any

import pytest

from vllm_lite.config import demo_folder
from vllm_lite.errors import ConfigError
from vllm_lite.server.config import Keys, ServeConfig
from vllm_lite.server.processes.serve_models import keys_of
from vllm_lite.server.router.catalog import Catalog, read_catalog
from vllm_lite.server.router.config import RouterConfig

DEMO = Path(demo_folder())


def read(tmp_path: Path, text: str, **front: Any) -> tuple[Catalog, dict[str, Any]]:
    file = tmp_path / "models.yaml"
    file.write_text(text)
    return read_catalog(str(file), ServeConfig.check(front))


def test_a_file_of_models(tmp_path: Path) -> None:
    text = """
    models_memory: 20GiB
    defaults: {max-num-seqs: 7, dtype: float32}
    models:
      chat: {model: demo, aliases: [gpt-4o, other], pin: true, idle-s: 60, max_model_len: 1k, api_key: [own]}
      plain: demo
      embed: {model: org/embed, max_num_seqs: 3, lora_modules: [sql=/adapters/sql], enable_lora: true}
    """
    catalog, of_router = read(tmp_path, text, device="cpu", port=1234, max_num_seqs=9)
    assert of_router == {"models_memory": "20GiB"}
    chat, plain, embed = catalog.entries.values()
    assert (chat.aliases, chat.pin, chat.idle_s, chat.trouble) == (("gpt-4o", "other"), True, 60.0, None)
    assert chat.config is not None
    assert chat.config.names == ("chat", "gpt-4o", "other", "chat:latest", "gpt-4o:latest", "other:latest")
    assert (chat.config.max_model_len, chat.config.max_num_seqs, chat.config.dtype) == (1000, 7, "float32")
    assert chat.config.port == 8000, "the router's own"
    assert plain.config is not None
    assert plain.config.device == "cpu"
    assert embed.config is not None
    assert embed.config.max_num_seqs == 3
    assert catalog.find("sql") is embed
    assert catalog.find("other:latest") is chat
    assert catalog.find("nothing") is None


@pytest.mark.parametrize(
    ("settings", "trouble"),
    [
        ("{model: demo, max_model_len: -1}", "bad: max_model_len: must be at least 1"),
        ("{model: demo, max_modell_len: 5}", "bad: unknown setting 'max_modell_len'; did you mean 'max_model_len'?"),
        ("{model: /nowhere/at/all}", "bad: model '/nowhere/at/all' is neither a folder or file here nor a hub id"),
        ("{dtype: float32}", "bad: has no `model`: a folder, a GGUF file or a hub id"),
        ("{model: demo, port: 1}", "bad: port is a setting of the router, not of one model; give it to `serve`"),
        ("{model: demo, pin: 7.5}", "bad: Expected `bool`"),
        ("{model: demo, aliases: [good]}", "the name 'good' is that of the model 'good' already"),
        ("{model: demo, aliases: ['a b']}", "'a b' is not a name of a model"),
    ],
)
def test_a_bad_entry_is_one_sentence_and_the_rest_is_served(tmp_path: Path, settings: str, trouble: str) -> None:
    catalog, _ = read(tmp_path, f"models:\n  good: demo\n  bad: {settings}\n  fine: demo\n")
    assert list(catalog.entries) == ["good", "bad", "fine"]
    assert catalog.entries["bad"].config is None
    assert str(catalog.entries["bad"].trouble).startswith(trouble)
    assert "\n" not in str(catalog.entries["bad"].trouble)
    assert all(catalog.entries[name].trouble is None for name in ("good", "fine"))


def test_a_name_is_of_one_model(tmp_path: Path) -> None:
    """The first that has it keeps it, whether as its name or as an alias."""
    text = "models:\n  a: {model: demo, aliases: [x, b]}\n  b: demo\n  c: {model: demo, aliases: [x]}\n"
    catalog, _ = read(tmp_path, text)
    assert catalog.entries["b"].trouble == "the name 'b' is that of the model 'a' already"
    assert catalog.entries["c"].trouble == "the name 'x' is that of the model 'a' already"
    assert {name: getattr(catalog.find(name), "name", None) for name in "abcx"} == {
        "a": "a",
        "b": "a",
        "c": "c",
        "x": "a",
    }


def test_a_file_that_is_wrong_as_a_whole(tmp_path: Path) -> None:
    for text, why in [
        ("models: [1]", "`models` must be a table"),
        ("models: {a: demo}\nmodels_memorie: 5", "unknown setting 'models_memorie'"),
        ("models: {}", "holds no model"),
    ]:
        with pytest.raises(ConfigError, match=why):
            read(tmp_path, text)
    with pytest.raises(ConfigError, match="is neither a file nor a folder"):
        read_catalog(str(tmp_path / "none"), ServeConfig())


def test_a_folder_of_models(tmp_path: Path) -> None:
    for name in ("one", "org/two", ".hidden", "empty"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("one", "org/two", ".hidden"):
        (tmp_path / name / "config.json").write_text("{}")
    for name in ("three-Q4_K_M.gguf", "mmproj-three.gguf", "four-00001-of-00002.gguf", "four-00002-of-00002.gguf"):
        (tmp_path / name).write_bytes(b"")
    catalog, _ = read_catalog(str(tmp_path), ServeConfig())
    assert set(catalog.entries) == {"one", "org/two", "three-Q4_K_M", "four"}
    config = catalog.entries["four"].config
    assert config is not None
    assert config.model.endswith("four-00001-of-00002.gguf")


def test_memory() -> None:
    assert RouterConfig.check({"models_memory": "24GiB"}).memory_bytes == 24 << 30
    assert RouterConfig().memory_bytes > 0
    with pytest.raises(ConfigError, match="models_memory: expected an amount of memory"):
        RouterConfig.check({"models_memory": "lots"})


def test_settings_that_were_given_win_over_those_in_the_file_of_models() -> None:
    config = RouterConfig.check({"models": "x", "models_max": 2}).over({"models_max": 5, "models_idle_s": 7})
    assert (config.models_max, config.models_idle_s) == (2, 7.0)
    with pytest.raises(ConfigError, match="models_max: must be at least 1"):
        config.over({"models_max": 0})
    with pytest.raises(ConfigError, match="models_max is for --models"):
        RouterConfig.check({"models_max": 2}).of_one_model()
    assert RouterConfig.check({"port": 9}).of_one_model() == ServeConfig(port=9)


def test_keys_of_a_model() -> None:
    assert keys_of(ServeConfig(), Keys()) == Keys()
    keys = keys_of(ServeConfig(api_key=("own",)), Keys(("all",)))
    assert keys.user == ("all", "own")
    assert len(keys.admin) == 1
    assert len(keys.admin[0]) > 30
