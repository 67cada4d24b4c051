"""ServeConfig: the settings of `vllm-lite serve`: an engine's, and the HTTP server's own."""

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
    """API keys. `user` keys allow the routes that generate; () = no key is needed. `admin` keys allow all routes."""

    user: tuple[str, ...] = ()
    admin: tuple[str, ...] = ()


class ServeConfig(EngineConfig, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Settings of the server. Construct with `ServeConfig.load(...)`, which checks every value."""

    host: Annotated[
        str, Section("where it listens"), Meta(description="address to listen on; 0.0.0.0 is all interfaces")
    ] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0 is any free one")] = 8000
    uds: Annotated[str | None, Meta(description="Unix socket to listen on, instead of host and port")] = None
    root_path: Annotated[
        str | None,
        Meta(description="path under which a proxy exposes the server, e.g. /llm; routes work with and without it"),
    ] = None
    api_server_count: Annotated[
        int, Meta(ge=1, le=64, description="processes that serve HTTP here; each has its share of the queue limits")
    ] = 1

    api_key: Annotated[
        tuple[str, ...], Section("who may call"), Meta(description="keys of which clients must send one")
    ] = ()
    api_key_file: Annotated[str | None, Meta(description="file with one key on each line")] = None
    admin_api_key: Annotated[
        tuple[str, ...], Meta(description="keys that also allow routes that change the server, like /pause")
    ] = ()
    admin_api_key_file: Annotated[str | None, Meta(description="file with one admin key on each line")] = None
    ssl_keyfile: Annotated[str | None, Meta(description="private key, for https")] = None
    ssl_certfile: Annotated[str | None, Meta(description="certificate, for https")] = None
    ssl_ca_certs: Annotated[str | None, Meta(description="CA certificates for clients' certificates")] = None
    ssl_cert_reqs: Annotated[int, Meta(ge=0, le=2, description="clients' certificates: 0 none, 1 optional, 2 must")] = 0
    ssl_ciphers: Annotated[
        str | None, Meta(description="ciphers of TLS 1.2 and below, in OpenSSL's form (default: OpenSSL's choice)")
    ] = None
    public_metrics: Annotated[bool, Meta(description="/metrics needs no key")] = False
    public_docs: Annotated[bool, Meta(description="/, /docs, /redoc, /openapi.json and /version need no key")] = False
    disable_fastapi_docs: Annotated[bool, Meta(description="remove /docs, /redoc and /openapi.json")] = False
    enable_tokenizer_info_endpoint: Annotated[
        bool, Meta(description="/tokenizer_info shows the tokenizer's settings and the chat template")
    ] = False
    allowed_hosts: Annotated[
        tuple[str, ...] | None,
        Meta(
            description="host names that requests may name besides this machine's, *.example.org for a domain, "
            "* for any (default: none if only this machine reaches the server and there are no keys, else any)"
        ),
    ] = None
    allowed_origins: Annotated[
        tuple[str, ...] | None,
        Meta(
            description="origins of web pages that may call this server, * for all, [] for none (CORS; default: pages "
            "of this machine if only it reaches the server and there are no keys, else none)"
        ),
    ] = None
    allowed_methods: Annotated[tuple[str, ...], Meta(description="HTTP methods that such pages may use")] = ("*",)
    allowed_headers: Annotated[tuple[str, ...], Meta(description="headers such pages may send")] = ("*",)
    allow_credentials: Annotated[bool, Meta(description="such pages may send cookies")] = False

    max_num_queued_reqs: Annotated[
        int,
        Section("how much"),
        Meta(ge=0, description="requests that may wait for a row of the batch; more are refused (429)"),
    ] = 10_000
    max_num_queued_tokens: Annotated[
        Count | None, Meta(description="prompt tokens of requests without a first token yet; more are refused (429)")
    ] = None
    max_request_bytes: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="bytes of a body at most (default: 4M, with images 32M, or 8 for each context token)"),
    ] = None
    limit_mm_per_prompt: Annotated[
        dict[Literal["image", "video", "audio"], Annotated[int, Meta(ge=0)]] | None,
        Meta(description='JSON, e.g. {"image":4}: media of one prompt (default: 64 images; there are no others)'),
    ] = None
    mm_processor_kwargs: Annotated[
        dict[str, Any] | None,
        Meta(description='JSON, e.g. {"max_pixels":802816}: image processor settings; a chat may override them'),
    ] = None
    max_image_pixels: Annotated[
        int, Meta(ge=1, description="pixels of an image at most; its header is checked before it is decoded")
    ] = MAX_PIXELS
    allowed_media_domains: Annotated[
        tuple[str, ...],
        Meta(description="domains from which images are fetched, if they are at public addresses (default: none)"),
    ] = ()
    header_timeout_s: Annotated[float, Meta(gt=0, description="time for the headers of a request")] = 10.0
    body_timeout_s: Annotated[float, Meta(gt=0, description="time for the body of a request")] = 60.0
    write_timeout_s: Annotated[float, Meta(gt=0, description="time in which a client must read what it is sent")] = 60.0
    stream_resume_s: Annotated[
        float, Meta(ge=0, description="seconds for which a resumable stream is kept after its connection broke")
    ] = 30.0
    responses_store: Annotated[
        str | None,
        Meta(description="SQLite file that keeps the answers of /v1/responses (default: memory, for each API server)"),
    ] = None
    responses_store_bytes: Annotated[Count, Meta(description="bytes of them; beyond that the oldest are dropped")] = (
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
        Meta(description='JSON, e.g. {"enable_thinking":false}: template variables, which a chat may override'),
    ] = None
    reasoning_effort_map: Annotated[
        dict[str, str] | None,
        Meta(description='JSON, e.g. {"medium":"low"}: values given to the template in place of a reasoning effort'),
    ] = None
    tool_call_parser: Annotated[
        str, Meta(description="format of the model's tool calls, by vLLM's name; auto: detected; or none")
    ] = "auto"
    reasoning_parser: Annotated[
        str, Meta(description="format of the model's reasoning, by vLLM's name; auto: detected; or none")
    ] = "auto"
    enable_auto_tool_choice: Annotated[
        bool, Meta(description="accepted for vLLM's sake: always on if the format of tool calls is known")
    ] = False
    tool_strict_level: Annotated[
        Literal["auto", "function", "parameter"],
        Meta(
            description="constraint on optional tool calls: auto obeys the tool's `strict`, function holds name "
            "and format, parameter the schema as well"
        ),
    ] = "auto"
    generation_config: Annotated[
        str,
        Meta(
            description="source of sampling defaults: auto is the model's generation_config.json, vllm is none, "
            "else a folder with such a file"
        ),
    ] = "auto"
    override_generation_config: Annotated[
        GenerationOverrides | None, Meta(description='JSON, e.g. {"temperature":0.5}: defaults that override the file')
    ] = None
    return_tokens_as_token_ids: Annotated[
        bool, Meta(description="logprobs have token_id:N in place of a token's text, unless a request says otherwise")
    ] = False
    enable_force_include_usage: Annotated[
        bool, Meta(description="every chunk of a stream has the usage, whatever its stream_options")
    ] = False
    enable_log_requests: Annotated[bool, Meta(description="log every request, with its prompt")] = False
    otlp_traces_endpoint: Annotated[
        str | None,
        Meta(description="OpenTelemetry collector, e.g. http://localhost:4318, that gets a span for each request"),
    ] = None

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
        """Names by which clients can request the model; answers have the first. () if not set."""
        return tuple((self.served_model_name or "").replace(",", " ").split())

    @property
    def root(self) -> str:
        """The root path without a trailing slash; "" if there is none."""
        return (self.root_path or "").rstrip("/")

    def engine(self) -> EngineConfig:
        """Return the engine's part of the settings."""
        values = {name: getattr(self, name) for name in EngineConfig.__struct_fields__}
        values["served_model_name"] = self.names[0] if self.names else None
        return EngineConfig(**values)

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.uds is not None or is_loopback(self.host) or is_loopback(address_of(self.host))

    def trusts_machine(self, keys: Keys) -> bool:
        """Whether any program of this machine may use the server without a key, so that a browser could be made to by a
        stranger's page. A Unix socket is exempt: no browser opens one."""
        return self.is_local and self.uds is None and not keys.user

    def keys(self) -> Keys:
        """Return all API keys, those in files included. Raises ConfigError."""
        return Keys(
            (*self.api_key, *_keys_in("api_key_file", self.api_key_file)),
            (*self.admin_api_key, *_keys_in("admin_api_key_file", self.admin_api_key_file)),
        )

    def to_yaml(self) -> str:
        """Format all values as a file for --config. Keys are left out."""
        values = {name: getattr(self, name) for name in self.__struct_fields__ if name not in SECRET}
        return msgspec.yaml.encode(msgspec.to_builtins(values)).decode()


def is_loopback(host: str) -> bool:
    """Whether a name or an address means this machine, on whichever machine it is resolved."""
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
    """Address to which `host` resolves for listening; `host` itself if there is none."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][4][0])
    except (OSError, UnicodeError):
        return host


def _keys_in(name: str, path: str | None) -> list[str]:
    if path is None:
        return []
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} {path!r} cannot be read: {error}") from error
    found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not found:
        raise ConfigError(f"{name} {path!r} holds no key; write one on each line")
    return found
