"""Flags of `vllm serve` that are not settings here: accepted by the parser, hidden in --help, and handled by the
settings. runtime/vllm_settings.py lists them, with the reasons."""

import argparse
import sys
from collections.abc import Iterator
from typing import Any, TypeVar

from vllm_lite.runtime.settings import add_flags as add_config_flags
from vllm_lite.runtime.vllm_settings import REFUSED, SWITCHES, WITHOUT_EFFECT, Flags, Given
from vllm_lite.server.config import ServeConfig

C = TypeVar("C", bound=ServeConfig)


class _Give(argparse.Action):
    """Collects flags in the order in which they are given."""

    def __init__(self, *, row: Flags, is_refused: bool, **settings: Any) -> None:
        super().__init__(**settings)
        self._row, self._is_refused = row, is_refused

    def __call__(self, _: object, namespace: argparse.Namespace, value: Any, flag: str | None = None) -> None:
        flag = flag or ""
        if self._row.values == SWITCHES:
            value = not flag.startswith("--no-")
        before = getattr(namespace, self.dest, None) or []
        setattr(namespace, self.dest, [*before, Given(flag, self._row, value, self._is_refused)])


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Make `parser` accept them; those given are in `of_vllm`."""
    parser.set_defaults(of_vllm=[])
    for table, is_refused in ((WITHOUT_EFFECT, False), (REFUSED, True)):
        for row in table:
            for name, count in _spellings(row, is_refused=is_refused):
                more: dict[str, Any] = {"row": row, "is_refused": is_refused, "nargs": count}
                parser.add_argument(
                    name, dest="of_vllm", action=_Give, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **more
                )


def _spellings(row: Flags, *, is_refused: bool) -> Iterator[tuple[str, int | str | None]]:
    """Each flag with its nargs: a switch has none, and a --no- form; a refused flag may have many values."""
    for name in row.names.split():
        if row.values == SWITCHES:
            yield name, 0
            if name.startswith("--"):
                yield f"--no-{name[2:]}", 0
        else:
            yield name, "+" if is_refused else None


def say(text: str) -> None:
    """Print the notice of settings without effect."""
    print(f"vllm-lite: {text}", file=sys.stderr)


# ---- the commands that serve


def add_settings(parser: argparse.ArgumentParser, kind: type[ServeConfig], model: str) -> None:
    """Add MODEL, described by `model`, and flags for all settings of `kind`, from a file as well."""
    parser.add_argument("folder", metavar="MODEL", nargs="?", help=model)
    parser.add_argument("--config", metavar="FILE", help="YAML or TOML file with settings")
    parser.add_argument("--print-config", action="store_true", help="print all settings as such a file, and exit")
    add_config_flags(parser, kind)
    add_flags(parser)


def load_settings(arguments: argparse.Namespace, kind: type[C]) -> C:
    """The settings given by these flags. Raises ConfigError."""
    flags = {name: getattr(arguments, name) for name in kind.__struct_fields__}
    flags["model"] = arguments.model if arguments.folder is None else arguments.folder
    return kind.load(flags, file=arguments.config, of_vllm=arguments.of_vllm, notice=say)
