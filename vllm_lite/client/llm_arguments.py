"""Arguments of LLM's methods, which take one prompt or several, and errors that say which of them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from vllm_lite.client.pooling import PoolingStream
from vllm_lite.client.prompt import PromptLike
from vllm_lite.client.streams.stream import RequestStream
from vllm_lite.errors import RequestError
from vllm_lite.protocol.params import SamplingParams

AnyStream = RequestStream | PoolingStream


@contextmanager
def named(name: str) -> Iterator[None]:
    """Put `name`, which says which of several prompts it is, before the text of an error."""
    try:
        yield
    except RequestError as error:
        raise RequestError(f"{name}: {error}" if name else str(error)) from error


def as_list(prompts: Any) -> list[PromptLike]:
    """Make a list of one prompt or several. A list of integers is one prompt of token ids."""
    if isinstance(prompts, (str, bytes, bytearray, Mapping)) or not isinstance(prompts, Iterable):
        one: Any = prompts
        return [one]
    several: list[Any] = list(prompts)
    return [several] if several and isinstance(several[0], int) else several


def params_for_each(given: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    """The params of each of `count` prompts. Raises RequestError."""
    if isinstance(given, SamplingParams):
        return [given] * count
    if not isinstance(given, Sequence) or len(given) != count:
        got = len(given) if isinstance(given, Sequence) else type(given).__name__
        raise RequestError(f"sampling_params must be one for all or one for each of {count} prompts, got {got}")
    return list(given)


def with_priorities(params: list[SamplingParams], given: int | Sequence[int] | None) -> list[SamplingParams]:
    """The params with `given` priorities, one for all or one for each; None: with their own. Raises RequestError."""
    if given is None:
        return params
    each = list(given) if isinstance(given, Sequence) else [given] * len(params)
    if len(each) != len(params):
        raise RequestError(f"priority must be one for all or one for each of {len(params)} prompts, got {len(each)}")
    try:
        return [one.clone(priority=priority) for one, priority in zip(params, each, strict=True)]
    except (ValueError, TypeError) as error:
        raise RequestError(str(error)) from error


def pairs_of(first: str | Sequence[str], second: str | Sequence[str]) -> list[tuple[str, str]]:
    """One text with each of several, or texts in pairs. Raises RequestError."""
    left = [first] if isinstance(first, str) else list(first)
    right = [second] if isinstance(second, str) else list(second)
    if not right or len(left) not in (1, len(right)):
        raise RequestError(f"{len(left)} texts cannot be paired with {len(right)}: give one, or as many")
    return list(zip(left * (len(right) if len(left) == 1 else 1), right, strict=True))


def raise_errors(streams: Sequence[AnyStream]) -> None:
    """Raise the error of a stream that has failed, one that is not a request's own first."""
    failed = [(place, stream.error) for place, stream in enumerate(streams) if stream.error is not None]
    for _, error in failed:
        if not isinstance(error, RequestError):
            raise error
    if failed:
        place, error = failed[0]
        others = f" ({len(failed) - 1} other prompts failed as well)" if len(failed) > 1 else ""
        raise RequestError(f"prompt {place}: {error}{others}" if len(streams) > 1 else str(error)) from error
