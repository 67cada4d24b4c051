"""CURVE keys as files, and the command that makes them."""

import logging
import os
import re
import stat
from pathlib import Path

import pytest

from vllm_lite.errors import ConfigError
from vllm_lite.tools import cli
from vllm_lite.transport.keys import (
    ENV,
    Authorised,
    load_client_keys,
    load_engine_keys,
    make_client_keys,
    make_engine_keys,
)

ADDRESS = "tcp://engine:5555"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    make_engine_keys(folder)
    return folder


def test_keys_are_private_with_any_umask(keys: Path) -> None:
    mask = os.umask(0)
    try:
        make_client_keys(keys, "alice")
    finally:
        assert os.umask(mask) == 0
    paths = [keys, *keys.rglob("*")]
    assert {path.name for path in paths} >= {"server.key_secret", "client.key_secret", "alice.key"}
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_engine_and_client_have_each_others_public_key(keys: Path) -> None:
    bundle = make_client_keys(keys, "alice")
    engine, client = load_engine_keys(keys), load_client_keys(ADDRESS, bundle)
    assert client is not None
    assert client.server == engine.public
    assert len({engine.public, engine.secret, client.public, client.secret}) == 4
    assert Authorised(engine.clients).name_of(client.public) == "alice"
    assert Authorised(engine.clients).name_of(engine.public) is None
    public = list(keys.rglob("*.key"))
    assert len(public) == 4
    assert not any(re.search(r"^\s*secret-key", path.read_text(), re.MULTILINE) for path in public)


def test_keys_are_never_overwritten(keys: Path) -> None:
    make_client_keys(keys, "alice")
    before = {path: path.read_bytes() for path in keys.rglob("*") if path.is_file()}
    assert not make_engine_keys(keys)
    with pytest.raises(ConfigError, match=r"there is a client 'alice' already: .*/clients/alice\.key"):
        make_client_keys(keys, "alice")
    assert {path: path.read_bytes() for path in keys.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["", "..", "a/b", "-a", "a b", "x" * 65, "../clients/alice"])
def test_a_client_has_the_name_of_a_file(keys: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="a client's name has up to 64 letters"):
        make_client_keys(keys, name)


def test_clients_come_and_go_while_an_engine_runs(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    alice = load_client_keys(ADDRESS, make_client_keys(keys, "alice"))
    authorised = Authorised(keys / "clients")
    assert alice is not None
    assert authorised.name_of(alice.public) == "alice"
    bob = load_client_keys(ADDRESS, make_client_keys(keys, "bob"))
    assert bob is not None
    assert authorised.name_of(bob.public) == "bob"
    (keys / "clients/alice.key").unlink()
    (keys / "clients/broken.key").write_text("no key")
    assert authorised.name_of(alice.public) is None
    assert authorised.name_of(bob.public) == "bob"
    assert "broken.key is not a key file" in caplog.text


def test_an_overwritten_key_is_no_longer_accepted(keys: Path) -> None:
    old, new = (load_client_keys(ADDRESS, make_client_keys(keys, name)) for name in ("alice", "alice2"))
    assert old is not None
    assert new is not None
    authorised = Authorised(keys / "clients")
    assert authorised.name_of(old.public) == "alice"
    given = keys / "clients/alice2.key"
    text = given.read_text()
    given.unlink()
    assert authorised.name_of(old.public) == "alice"
    (keys / "clients/alice.key").write_text(text)
    assert authorised.name_of(old.public) is None
    assert authorised.name_of(new.public) == "alice"


def test_no_key_is_accepted_without_the_folder(tmp_path: Path) -> None:
    assert Authorised(tmp_path / "none").name_of(b"x" * 40) is None


def test_a_secret_that_others_can_read_is_reported(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_engine_keys(keys)
    assert not caplog.records
    os.chmod(keys / "server.key_secret", 0o640)
    with caplog.at_level(logging.WARNING):
        load_engine_keys(keys)
    assert "server.key_secret can be read by others; chmod 600 it" in caplog.text


def test_missing_files_are_named(keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV, raising=False)
    with pytest.raises(
        ConfigError, match=r"none/server\.key_secret is not a key file: .*; make one with `vllm-lite keys`"
    ):
        load_engine_keys(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"client\.key_secret is not a key file"):
        load_client_keys(ADDRESS, keys)
    with pytest.raises(ConfigError, match=rf"{ADDRESS} needs keys: .* or keys=False for an unencrypted connection"):
        load_client_keys(ADDRESS, None)
    (keys / "server.key_secret").write_text((keys / "server.key").read_text())
    with pytest.raises(ConfigError, match="holds no secret key"):
        load_engine_keys(keys)
    (keys / "server.key_secret").write_text('curve\n    public-key = "short"\n    secret-key = "short"\n')
    with pytest.raises(ConfigError, match="a key has 40 characters"):
        load_engine_keys(keys)


def test_only_tcp_needs_keys(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = make_client_keys(keys, "alice")
    monkeypatch.setenv(ENV, str(bundle))
    assert load_client_keys("ipc:///tmp/x", None) is None
    assert load_client_keys(ADDRESS, False) is None
    assert load_client_keys(ADDRESS, None) == load_client_keys(ADDRESS, bundle)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "keys"
    assert cli.main(["keys", str(folder)]) == 0
    assert "may connect: nobody yet" in capsys.readouterr().out
    assert cli.main(["keys", str(folder), "alice", "bob"]) == 0
    out = capsys.readouterr().out
    assert "has the keys of an engine already" in out
    assert f"{folder}/for/bob: bring this folder to bob" in out
    assert "may connect: alice, bob" in out
    assert cli.main(["keys", str(folder), "alice"]) == 2
    assert capsys.readouterr().err == f"vllm-lite: there is a client 'alice' already: {folder}/clients/alice.key\n"
    (tmp_path / "file").write_text("")
    assert cli.main(["keys", str(tmp_path / "file")]) == 2
    assert "keys cannot be written" in capsys.readouterr().err
