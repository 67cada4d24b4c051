"""What a quantization_config has for the names of layers. The file may be a stranger's."""

import re

from vllm_lite.errors import ModelError

MAX_REPEATS = 4
"""In a regular expression, as names of 60 characters are matched in less than 60^4 steps."""
MAX_EXPRESSION = 400
"""Characters."""
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
    """Raise ModelError for one that is none, or could take for ever: more than MAX_REPEATS repetitions, or one of a
    group. `key`: where in quantization_config it stands."""
    num_repeats = sum(expression.count(sign) for sign in "*+?{") - expression.count("(?:")
    groups = re.search(r"\)[*+?{]|\(\?(?!:)", expression)
    if num_repeats > MAX_REPEATS or groups or len(expression) > MAX_EXPRESSION:
        raise ModelError(
            f"quantization_config.{key}: {expression[:MAX_EXPRESSION]!r} is too complex; at most {MAX_REPEATS} "
            f"repetitions, none of a group, and {MAX_EXPRESSION} characters are supported"
        )
    try:
        re.compile(expression)
    except re.error as error:
        raise ModelError(f"quantization_config.{key}: {expression!r} is not a regular expression ({error})") from error
