"""Beam search under vLLM's names: its params, and its results, made from those of a request."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from vllm_lite.client.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, RequestOutput
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.errors import RequestError
from vllm_lite.protocol.params import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class BeamSearchParams:
    """Keep the `beam_width` likeliest continuations of a prompt, for at most `max_tokens` tokens.

    They are ranked by cum_logprob / num_generated ** length_penalty. `early_stopping` ends a search as soon as
    `beam_width` beams have ended, and not only when no other can be better. The search follows the model's own
    logprobs, so `temperature` must be 0. `include_stop_str_in_output` shows the text of a token in `stop_token_ids`.

    Raises ValueError or TypeError with the name, the value and the range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: bool = False
    stop_token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        if self.temperature != 0:
            raise ValueError(
                f"beam search follows the model's own logprobs, so temperature must be 0, got {self.temperature!r}"
            )
        try:
            self.sampling_params()
        except (ValueError, TypeError) as error:
            message = str(error)
            if not message.startswith("n must"):
                raise
            raise type(error)(f"beam_width{message[1:]}") from None

    def sampling_params(self) -> SamplingParams:
        """The sampling params of a request that does this search. Their fields have the same names, but for the width;
        their temperature has no meaning."""
        same = [field.name for field in fields(self) if field.name not in ("beam_width", "temperature")]
        return SamplingParams(use_beam_search=True, n=self.beam_width, **{name: getattr(self, name) for name in same})


def sampling_of(given: BeamSearchParams) -> SamplingParams:
    """The sampling params of a search. Raises RequestError for params of another kind."""
    if not isinstance(given, BeamSearchParams):
        raise RequestError(f"params of beam_search must be BeamSearchParams, got {type(given).__name__}")
    return given.sampling_params()


def beams_of(output: RequestOutput, tokenizer: Tokenizer | None) -> BeamSearchOutput:
    """Read the beams from the output of a request with use_beam_search."""
    prompt = output.prompt_token_ids
    return BeamSearchOutput([_sequence(prompt, found, tokenizer) for found in output.outputs], prompt)


def _sequence(prompt: list[int], found: CompletionOutput, tokenizer: Tokenizer | None) -> BeamSearchSequence:
    tokens = prompt + found.token_ids
    text = None if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=False)
    return BeamSearchSequence(tokens, found.cumulative_logprob or 0.0, text, found.finish_reason, found.stop_reason)
