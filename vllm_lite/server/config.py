"""ServeConfig: the settings of `vllm-lite serve`, which are an engine's and the HTTP server's own."""

import re
import socket
from functools import cache
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from vllm_lite.client.generation_config import GenerationOverrides, check_source
from vllm_lite.client.media.sources import MAX_PIXELS
from vllm_lite.config import EngineConfig
from vllm_lite.errors import ConfigError
from vllm_lite.runtime.nested_settings import Count
from vllm_lite.runtime.settings import Section

SECRET = {"api_key", "admin_api_key"}


class Keys(NamedTuple):
    """`user` keys open the routes that generate, () = no key is needed; `admin` keys open all routes."""

    user: tuple[str, ...] = ()
    admin: tuple[str, ...] = ()


class ServeConfig(EngineConfig, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Build it with `ServeConfig.load(...)`, which checks every value."""

    host: Annotated[
        str, Section("where it listens"), Meta(description="address to listen on; 0.0.0.0 is every network")
    ] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="0 takes any that is free")] = 8000
    uds: Annotated[str | None, Meta(description="Unix socket to listen on, instead of host and port")] = None
    root_path: Annotated[
        str | None,
        Meta(description="path under which a proxy shows the server, e.g. /llm; it answers there and without it"),
    ] = None
    api_server_count: Annotated[
        int, Meta(ge=1, le=64, description="processes that serve HTTP here; each has its share of the queue limits")
    ] = 1

    api_key: Annotated[
        tuple[str, ...], Section("who may call"), Meta(description="keys that clients must give, one of them")
    ] = ()
    api_key_file: Annotated[str | None, Meta(description="file with one key on each line")] = None
    admin_api_key: Annotated[
        tuple[str, ...], Meta(description="keys that open what changes the server, like /reset_prefix_cache, as well")
    ] = ()
    admin_api_key_file: Annotated[str | None, Meta(description="file with one such key on each line")] = None
    ssl_keyfile: Annotated[str | None, Meta(description="private key, for https")] = None
    ssl_certfile: Annotated[str | None, Meta(description="certificate, for https")] = None
    ssl_ca_certs: Annotated[str | None, Meta(description="certificates that clients' must be signed by")] = None
    ssl_cert_reqs: Annotated[int, Meta(ge=0, le=2, description="clients' certificates: 0 no, 1 optional, 2 must")] = 0
    ssl_ciphers: Annotated[
        str | None, Meta(description="ciphers of TLS 1.2 and below, in OpenSSL's form (default: OpenSSL's choice)")
    ] = None
    public_metrics: Annotated[bool, Meta(description="/metrics needs no key")] = False
    public_docs: Annotated[bool, Meta(description="/, /docs, /redoc, /openapi.json and /version need no key")] = False
    disable_fastapi_docs: Annotated[bool, Meta(description="there are no /docs, /redoc and /openapi.json")] = False
    enable_tokenizer_info_endpoint: Annotated[
        bool, Meta(description="/tokenizer_info shows the tokenizer's settings and the chat template")
    ] = False
    allowed_hosts: Annotated[
        tuple[str, ...] | None,
        Meta(
            description="names by which it may be called besides this machine's, *.example.org for all of a domain, "
            "* for any (default: none if only this machine reaches it and it has no keys, else any)"
        ),
    ] = None
    allowed_origins: Annotated[
        tuple[str, ...] | None,
        Meta(
            description="origins of web pages that may call this server, * for all, [] for none (CORS; default: pages "
            "of this machine if only it reaches the server and there are no keys, else none)"
        ),
    ] = None
    allowed_methods: Annotated[tuple[str, ...], Meta(description="what such pages may call")] = ("*",)
    allowed_headers: Annotated[tuple[str, ...], Meta(description="headers such pages may send")] = ("*",)
    allow_credentials: Annotated[bool, Meta(description="such pages may send cookies")] = False

    max_num_queued_reqs: Annotated[
        int,
        Section("how much"),
        Meta(ge=0, description="requests that may wait for a place in the batch; more are refused (429)"),
    ] = 10_000
    max_num_queued_tokens: Annotated[
        Count | None, Meta(description="prompt tokens of requests without a first token yet; more are refused (429)")
    ] = None
    max_request_bytes: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="longest body of a request (default: 4M, with images 32M, or 8 bytes for each context token)"),
    ] = None
    limit_mm_per_prompt: Annotated[
        dict[Literal["image", "video", "audio"], Annotated[int, Meta(ge=0)]] | None,
        Meta(description='JSON, e.g. {"image":4}: media of one prompt (default: 64 images; there are no others)'),
    ] = None
    mm_processor_kwargs: Annotated[
        dict[str, Any] | None,
        Meta(description='JSON, e.g. {"max_pixels":802816}: sizes of the image processor; a chat may say others'),
    ] = None
    max_image_pixels: Annotated[
        int, Meta(ge=1, description="pixels of an image by its header; a larger one is refused before it is decoded")
    ] = MAX_PIXELS
    allowed_media_domains: Annotated[
        tuple[str, ...],
        Meta(description="domains from which images are fetched, if they are at public addresses (default: none)"),
    ] = ()
    header_timeout_s: Annotated[float, Meta(gt=0, description="time for the headers of a request")] = 10.0
    body_timeout_s: Annotated[float, Meta(gt=0, description="time for the body of a request")] = 60.0
    write_timeout_s: Annotated[float, Meta(gt=0, description="time a client may leave what it is sent unread")] = 60.0
    stream_resume_s: Annotated[
        float,
        Meta(ge=0, description="how long a stream that was asked for as resumable is kept after its connection broke"),
    ] = 30.0
    responses_store: Annotated[
        str | None,
        Meta(description="SQLite file that keeps the answers of /v1/responses (default: memory, for each API server)"),
    ] = None
    responses_store_bytes: Annotated[Count, Meta(description="how much of them is kept; beyond that the oldest go")] = (
        32 * 1024 * 1024
    )
    shutdown_timeout: Annotated[
        float, Meta(ge=0, description="seconds that running requests may take to end after SIGTERM")
    ] = 5.0

    chat_template: Annotated[
        str | None,
        Section("answers"),
        Meta(description="one of the model's templates by its name, or a file with Jinja (default: the model's)"),
    ] = None
    default_chat_template_kwargs: Annotated[
        dict[str, Any] | None,
        Meta(
            description='JSON, e.g. {"enable_thinking":false}: variables of the template that a chat may set otherwise'
        ),
    ] = None
    reasoning_effort_map: Annotated[
        dict[str, str] | None,
        Meta(description='JSON, e.g. {"medium":"low"}: what the template is told in the place of a reasoning effort'),
    ] = None
    tool_call_parser: Annotated[
        str, Meta(description="format in which the model writes tool calls, by vLLM's name; auto: found out; or none")
    ] = "auto"
    reasoning_parser: Annotated[
        str, Meta(description="format in which the model writes its reasoning, in the same way; auto, or none")
    ] = "auto"
    enable_auto_tool_choice: Annotated[
        bool, Meta(description="taken for vLLM's sake: it is always on where a format of calls is known")
    ] = False
    tool_strict_level: Annotated[
        Literal["auto", "function", "parameter"],
        Meta(
            description="what holds calls of tools that may be made: auto the tool's own `strict`, function its name "
            "and form, parameter its schema as well"
        ),
    ] = "auto"
    generation_config: Annotated[
        str,
        Meta(
            description="where sampling defaults come from: auto is the model's generation_config.json, vllm none, "
            "else a folder with such a file"
        ),
    ] = "auto"
    override_generation_config: Annotated[
        GenerationOverrides | None, Meta(description='JSON, e.g. {"temperature":0.5}: defaults above those of the file')
    ] = None
    return_tokens_as_token_ids: Annotated[
        bool,
        Meta(description="logprobs have token_id:N in the place of a token's text, unless a request says otherwise"),
    ] = False
    enable_force_include_usage: Annotated[
        bool, Meta(description="every chunk of a stream has the usage, whatever its stream_options say")
    ] = False
    enable_log_requests: Annotated[bool, Meta(description="log every request, with its prompt")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_source(self.generation_config)
        if both := sorted({module.name for module in self.lora_modules} & {*self.names}):
            raise ValueError(f"lora_modules and served_model_name share the name {both[0]!r}")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("ssl_keyfile and ssl_certfile go together; give both")
        if self.root_path and not re.fullmatch(r"(/[\w.~%-]+)*/?", self.root_path):
            raise ValueError(f"root_path must be like /llm or /a/b, got {self.root_path!r}")
        if self.single_process and self.api_server_count > 1:
            raise ValueError(f"single_process has one API server; api_server_count is {self.api_server_count}")

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which clients may ask for the model; answers carry the first. () if not set."""
        return tuple((self.served_model_name or "").replace(",", " ").split())

    @property
    def root(self) -> str:
        """The root path without a slash at its end; "" if there is none."""
        return (self.root_path or "").rstrip("/")

    def engine(self) -> EngineConfig:
        """Return the engine's part of the settings."""
        values = {name: getattr(self, name) for name in EngineConfig.__struct_fields__}
        values["served_model_name"] = self.names[0] if self.names else None
        return EngineConfig(**values)

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return self.uds is not None or is_loopback(self.host) or is_loopback(address_of(self.host))

    def trusts_machine(self, keys: Keys) -> bool:
        """Whether any program of this machine may use it, and a browser could for a stranger: none opens a socket
        file."""
        return self.is_local and self.uds is None and not keys.user

    def keys(self) -> Keys:
        """Return all API keys, those in files included. Raises ConfigError."""
        return Keys(
            (*self.api_key, *_keys_in("api_key_file", self.api_key_file)),
            (*self.admin_api_key, *_keys_in("admin_api_key_file", self.admin_api_key_file)),
        )

    def to_yaml(self) -> str:
        """Write all values as a file for --config. Keys are left out."""
        values = {name: getattr(self, name) for name in self.__struct_fields__ if name not in SECRET}
        return msgspec.yaml.encode(msgspec.to_builtins(values)).decode()


def is_loopback(host: str) -> bool:
    """Whether a name or an address is that of this machine, wherever it is looked up."""
    name = host.lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ip_address(name)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


@cache
def address_of(host: str) -> str:
    """The address that a server of this name listens on; the name if there is none."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][4][0])
    except (OSError, UnicodeError):
        return host


def _keys_in(name: str, path: str | None) -> list[str]:
    if path is None:
        return []
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} {path!r} cannot be read: {error}") from error
    found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not found:
        raise ConfigError(f"{name} {path!r} holds no key; write one on each line")
    return found
