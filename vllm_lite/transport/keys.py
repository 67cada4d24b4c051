"""CURVE key pairs as files, laid out as ZeroMQ's certificates usually are (Z85 text).

FOLDER/server.key                   the engine's public key
FOLDER/server.key_secret            both of its keys, mode 0600
FOLDER/clients/NAME.key             the public keys of clients that may connect
FOLDER/for/NAME/                    files to give to a client: client.key_secret (0600), client.key and server.key
"""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from zmq import auth

from vllm_lite.errors import ConfigError
from vllm_lite.runtime import log

ENV = "VLLM_LITE_KEYS"
"""Environment variable with the default folder of a client's keys."""
SERVER, CLIENT = "server", "client"
PUBLIC, SECRET = ".key", ".key_secret"

KeysOption = str | Path | Literal[False] | None
"""A client's folder of keys; None: that of VLLM_LITE_KEYS; False: no keys, unencrypted."""

T = TypeVar("T")

logger = log.get(__name__)


class EngineKeys(NamedTuple):
    """The key pair of an engine; `clients` is the folder of the public keys that it accepts."""

    public: bytes
    secret: bytes
    clients: Path


class ClientKeys(NamedTuple):
    """The key pair of a client; `server` is the engine's public key, by which the client recognises it."""

    server: bytes
    public: bytes
    secret: bytes


def make_engine_keys(folder: Path) -> bool:
    """Create the engine's key pair. Returns False, without effect, if there is one. Raises ConfigError."""

    def make() -> bool:
        (folder / "clients").mkdir(parents=True, exist_ok=True)
        if any((folder / (SERVER + ending)).exists() for ending in (PUBLIC, SECRET)):
            return False
        auth.create_certificates(folder, SERVER)
        return True

    return _made(make)


def make_client_keys(folder: Path, name: str) -> Path:
    """Create a key pair for a client of the engine with the keys in `folder`, and authorise it.

    Returns the folder to give to the client. Raises ConfigError, also if the client's name is taken.
    """
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", name):
        raise ConfigError(f"a client's name has up to 64 letters, digits and any of _.-, got {name!r}")
    known, bundle = folder / "clients" / (name + PUBLIC), folder / "for" / name
    if known.exists() or bundle.exists():
        raise ConfigError(f"there is a client {name!r} already: {known if known.exists() else bundle}")

    def make() -> Path:
        bundle.mkdir(parents=True)
        auth.create_certificates(bundle, CLIENT)
        shutil.copy(folder / (SERVER + PUBLIC), bundle)
        shutil.copy(bundle / (CLIENT + PUBLIC), known)
        return bundle

    return _made(make)


def load_engine_keys(folder: str | Path) -> EngineKeys:
    """Read the key pair of an engine. Raises ConfigError."""
    public, secret = _load_secret(Path(folder) / (SERVER + SECRET))
    clients = Path(folder) / "clients"
    if not clients.is_dir():
        raise ConfigError(f"{clients} is missing: the folder with the public keys of those that may connect")
    return EngineKeys(public, secret, clients)


def load_client_keys(address: str, folder: KeysOption) -> ClientKeys | None:
    """The keys that a client needs for `address`; None if it needs none, or is to use none. Raises ConfigError."""
    if not address.startswith("tcp://") or folder is False:
        return None
    folder = folder or os.environ.get(ENV)
    if not folder:
        raise ConfigError(
            f"{address} needs keys: give the folder that `vllm-lite keys` made for this client as keys=... or {ENV}, "
            f"or keys=False for an unencrypted connection"
        )
    public, secret = _load_secret(Path(folder) / (CLIENT + SECRET))
    return ClientKeys(_load(Path(folder) / (SERVER + PUBLIC))[0], public, secret)


class Authorised:
    """The public keys in a folder; added, replaced and removed files take effect at the next connection."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: object = None
        self._names: dict[bytes, str] = {}

    def name_of(self, public_key: bytes) -> str | None:
        """Name of the client with this key (Z85), None if there is none."""
        seen = [(file, _version(file)) for file in sorted(self._folder.glob("*" + PUBLIC))]
        if seen != self._seen:
            self._seen, self._names = seen, {}
            for file, _ in seen:
                try:
                    self._names[_load(file)[0]] = file.stem
                except ConfigError as error:  # other clients are not affected
                    logger.warning("%s", error)
        return self._names.get(public_key)


def _version(file: Path) -> tuple[int, ...] | None:
    """A value that changes with the file's content; None if the file has just been removed."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size


def _made(make: Callable[[], T]) -> T:
    """Call `make` with a umask under which its files are private. Raises ConfigError."""
    mask = os.umask(0o077)
    try:
        return make()
    except OSError as error:
        raise ConfigError(f"keys cannot be written: {error}") from error
    finally:
        os.umask(mask)


def _load_secret(file: Path) -> tuple[bytes, bytes]:
    public, secret = _load(file)
    if secret is None:
        raise ConfigError(f"{file} holds no secret key; make one with `vllm-lite keys`")
    if file.stat().st_mode & 0o077:
        logger.warning("%s can be read by others; chmod 600 it", file)
    return public, secret


def _load(file: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = auth.load_certificate(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is not a key file: {error}; make one with `vllm-lite keys`") from error
    if len(public) != 40 or (secret is not None and len(secret) != 40):
        raise ConfigError(f"{file} is not a key file: a key has 40 characters of Z85")
    return public, secret
