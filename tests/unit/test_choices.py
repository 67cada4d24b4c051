"""Errors about values of a fixed set: they name the set, wherever the value is."""

import enum
from typing import Annotated, Any, Literal

import msgspec
import pytest

from vllm_lite.choices import not_chosen, with_choices
from vllm_lite.client.beam import sampling_of
from vllm_lite.client.engines.operations import operation_of
from vllm_lite.client.media.programs import ProgramImages
from vllm_lite.config import EngineConfig
from vllm_lite.engine.scheduling.policy import load as load_policy
from vllm_lite.errors import ConfigError, RequestError
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.pooling import PoolingParams
from vllm_lite.runtime.settings import Settings
from vllm_lite.server.config import ServeConfig
from vllm_lite.server.openai import bodies
from vllm_lite.server.openai.bodies import CompletionBody, GenerateBody
from vllm_lite.server.openai.errors import ApiError


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Circle(msgspec.Struct, tag="circle"):
    color: Color = Color.RED


class Square(msgspec.Struct, tag="square"):
    side: Literal["left", "right"] | None = None


class Drawing(msgspec.Struct):
    shapes: list[Circle | Square] = []
    by_name: dict[Literal["first", "last"], Annotated[Literal[1, 2], msgspec.Meta(description="x")]] | None = None
    only: Literal["this"] = "this"
    drawn: Literal["no"] | Square = "no"
    pair: tuple[int, ...] = ()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"shapes": [{"type": "oval"}]}, "must be one of circle, square, got 'oval' - at `$.shapes[0].type`"),
        (
            {"shapes": [{"type": "circle", "color": "green"}]},
            "must be one of red, blue, got 'green' - at `$.shapes[0].color`",
        ),
        (
            {"shapes": [{"type": "square", "side": "a - at `$.only`"}]},
            "must be one of left, right, got 'a - at `$.only`' - at `$.shapes[0].side`",
        ),
        ({"by_name": {"middle": 1}}, "keys must be one of first, last, got 'middle' - at `$.by_name`"),
        ({"by_name": {"last": 3}}, "must be one of 1, 2, got 3 - at `$.by_name[...]`"),
        ({"only": "that"}, "must be this, got 'that' - at `$.only`"),
        ({"drawn": {"type": "square", "side": "up"}}, "must be one of left, right, got 'up' - at `$.drawn.side`"),
        ({"pair": ["a"]}, "Expected `int`, got `str` - at `$.pair[0]`"),
    ],
)
def test_the_set_is_named(given: dict[str, Any], text: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(given, Drawing)
    assert with_choices(caught.value, Drawing) == text


def test_the_value_may_have_no_path() -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert("green", Color | None)
    assert not_chosen(caught.value, Color | None) == ("must be one of red, blue", "'green'", "")


@pytest.mark.parametrize(
    ("kind", "fields", "text"),
    [
        (CompletionBody, {"prompt": "x", "truncation_side": "up"}, "`truncation_side` must be one of left, right, "),
        (GenerateBody, {"token_ids": [1], "output_mode": "json"}, "`output_mode` must be one of tokens, text"),
        (
            GenerateBody,
            {"token_ids": [1], "sampling_params": {"truncation_side": "up"}},
            "`sampling_params.truncation_side` must be one of left, right, got 'up'",
        ),
    ],
)
def test_a_body_names_the_field_first(kind: Any, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ApiError) as caught:
        bodies.read(msgspec.json.encode(fields), kind)
    assert caught.value.message.startswith(text)
    assert str(caught.value.param) in text


@pytest.mark.parametrize(
    ("kind", "values", "text"),
    [
        (ServeConfig, {"limit_mm_per_prompt": {"images": 1}}, "limit_mm_per_prompt: keys must be one of image, "),
        (EngineConfig, {"kv_events_config": {"publisher": "a"}}, "kv_events_config.publisher: must be one of zmq, "),
    ],
)
def test_a_setting_names_its_keys_and_values(kind: type[Settings], values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        kind.check(values)
    assert str(caught.value).startswith(text)


def test_a_value_is_shown_once() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.check({"pooler_config": {"pooling_type": "X"}})
    assert str(caught.value) == "pooler_config: pooling_type must be one of LAST, MEAN, CLS, got 'X'"


def test_values_of_python_callers() -> None:
    with pytest.raises(
        ConfigError, match=r"^limit_mm_per_prompt: keys must be one of image, video, audio, got 'images'$"
    ):
        ProgramImages({"images": 4})
    with pytest.raises(RequestError, match=r"^params of beam_search must be BeamSearchParams, got SamplingParams$"):
        sampling_of(SamplingParams())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^truncation_side: must be one of left, right, got 'up'$"):
        PoolingParams(truncation_side="up")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"^mode: must be one of abort, wait, keep, got 'stop'$"):
        operation_of("pause", mode="stop")


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("quantization", "int8, fp8, int4, int4_g32, awq, gptq, compressed-tensors, gguf"),
        ("device", "auto, cpu, cuda"),
        ("block_size", "1, 4, 8, 16, 32, 64, 128"),
        ("kv_cache_dtype", "auto, float32, bfloat16, float16, fp8, fp8_e4m3, fp8_e5m2, int8"),
    ],
)
def test_choices_are_listed(name: str, choices: str) -> None:
    value = 3 if name == "block_size" else "x"
    with pytest.raises(ConfigError, match=f"^{name}:? must be one of {choices}, got {value!r}$"):
        EngineConfig.check({name: value})


def test_a_scheduling_policy_that_is_unknown_is_told_the_others() -> None:
    with pytest.raises(
        ConfigError, match=r"^scheduling_policy must be one of fcfs, priority, deadline, fair or module"
    ):
        load_policy("lifo")
