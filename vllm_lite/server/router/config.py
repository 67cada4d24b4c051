"""RouterConfig: the settings of `vllm-lite serve` for one model, and of the router for several."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from vllm_lite.errors import ConfigError
from vllm_lite.runtime.machine import memory_limit_bytes, parse_bytes
from vllm_lite.runtime.settings import Section
from vllm_lite.server.config import ServeConfig

MEMORY_SHARE = 0.8
"""Default share of this machine's memory for all models."""


class RouterConfig(ServeConfig, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Settings of the router. Construct with `RouterConfig.load(...)`, which checks every value."""

    models: Annotated[
        str | None,
        Section("many models"),
        Meta(description="serve several models: a YAML or TOML file of them, a folder of them, or `hub`, its cache"),
    ] = None
    models_memory: Annotated[
        str | None, Meta(description="memory of all models, like 24GiB, as measured (default: 80 %% of the machine's)")
    ] = None
    models_max: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="models loaded at once, at most (default: no limit)")
    ] = None
    models_idle_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="seconds without requests after which a model is unloaded (default: when memory is needed)"),
    ] = None
    models_wait_s: Annotated[
        float, Meta(gt=0, description="seconds for which a request waits for its model before it is refused (503)")
    ] = 300.0
    models_slice_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="seconds for which a busy model keeps its memory while others wait for it (default: 10, "
            "or four times its loading time if that is more)"
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.models_memory is not None:
            parse_bytes("models_memory", self.models_memory)

    @property
    def memory_bytes(self) -> int:
        """Memory limit of all models together."""
        if self.models_memory is not None:
            return parse_bytes("models_memory", self.models_memory)
        return int(MEMORY_SHARE * memory_limit_bytes())

    def of_one_model(self) -> ServeConfig:
        """The settings of a server for one model. Raises ConfigError if settings of the router were given."""
        if given := next((name for name in self.changed() if name in OWN), None):
            raise ConfigError(f"{given} is for --models, which says which models to serve")
        return ServeConfig(**{name: getattr(self, name) for name in ServeConfig.__struct_fields__})

    def over(self, of_file: dict[str, Any]) -> "RouterConfig":
        """Fill settings that were not given from those of a file of models. Raises ConfigError."""
        checked, given = RouterConfig.check(of_file), self.changed()
        return msgspec.structs.replace(self, **{name: getattr(checked, name) for name in of_file if name not in given})


OWN = tuple(name for name in RouterConfig.__struct_fields__ if name not in ServeConfig.__struct_fields__)
"""Names of the settings that only the router has."""
