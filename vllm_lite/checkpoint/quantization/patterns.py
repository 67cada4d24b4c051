"""Patterns of a quantization_config for the names of layers. The file may be a stranger's."""

import re

import regex

from vllm_lite.errors import ModelError

MAX_EXPRESSION = 400
"""Characters. How long all of a file's expressions may take together is bounded where they are matched."""
_NAME = re.compile(r"[\w.-]+")


def is_name(text: str) -> bool:
    """Whether it is no expression."""
    return _NAME.fullmatch(text) is not None


def module_pattern(key: str, name: str) -> str:
    """The pattern of the module `name` and of all below it, for QuantizationSpec.dense: "gate" is "mlp.gate", and no
    "gate_proj". Raises ModelError for what is no name; `key`: where in quantization_config it stands."""
    if not is_name(name):
        raise ModelError(f"quantization_config {key}: {name!r} is not the name of a module")
    return name


def check_expression(key: str, expression: str) -> None:
    """Raise ModelError for one that is none, or too long. `key`: where in quantization_config it stands."""
    if len(expression) > MAX_EXPRESSION:
        raise ModelError(
            f"quantization_config.{key}: {expression[:MAX_EXPRESSION]!r}... has {len(expression)} characters; at most "
            f"{MAX_EXPRESSION} are supported in an expression"
        )
    try:
        regex.compile(expression)
    except regex.error as error:
        raise ModelError(f"quantization_config.{key}: {expression!r} is not a regular expression ({error})") from error
