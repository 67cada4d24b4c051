"""Reads: one request of the engine for each question. It computes the question's prompt after the shared state and
samples one token, of which only the logprobs of the labels matter.

The first question is sent alone and leaves the state in the prefix cache; then all others are sent together, and
compute only their own text.
"""

from collections.abc import Sequence
from math import exp
from typing import TypedDict

from vllm_lite.client.decisions.answers import Answer, DecisionOutput, Diagnostics, answer_of
from vllm_lite.client.decisions.labels import LabelIds, label_ids
from vllm_lite.client.decisions.questions import Question
from vllm_lite.client.decisions.shared import SharedText, encoded, number_alike
from vllm_lite.client.outputs import CompletionOutput
from vllm_lite.client.prompt import TokensPrompt, check_text
from vllm_lite.client.streams.stream import RequestStream, StreamFactory
from vllm_lite.errors import RequestError
from vllm_lite.protocol.params import RequestOutputKind, SamplingParams


class ReadParams(TypedDict, total=False):
    """Fields of SamplingParams that a decision may set, for all its questions."""

    priority: int
    user: str | None
    cache_salt: str | None
    deadline_ms: int | None


class Reads:
    """The requests of one decision. Their streams may be run in any order; `output()` needs all of them finished."""

    def __init__(self, questions: Sequence[Question], labels: Sequence[LabelIds], streams: list[RequestStream]) -> None:
        """Called by make_reads()."""
        self._questions = questions
        self._labels = labels
        self.streams = streams

    def output(self) -> DecisionOutput:
        """The answers. Raises the error of the first question that failed."""
        answers: dict[str, Answer] = {}
        diagnostics: dict[str, Diagnostics] = {}
        for question, labels, stream in zip(self._questions, self._labels, self.streams, strict=True):
            if isinstance(stream.error, RequestError) and len(self.streams) > 1:
                raise RequestError(f"question {question.id!r}: {stream.error}") from stream.error
            if stream.error is not None:
                raise stream.error
            (completion,) = stream.output().outputs
            probabilities, found = _read(completion, labels)
            answers[question.id] = answer_of(question, probabilities, found.label_mass)
            diagnostics[question.id] = found
        num_cached = sum(stream.num_cached_tokens or 0 for stream in self.streams)
        num_prompt = sum(len(stream.prompt.token_ids) for stream in self.streams)
        return DecisionOutput(answers, diagnostics, num_prompt, num_cached)


def make_reads(
    factory: StreamFactory,
    questions: Sequence[Question],
    text: SharedText,
    given: ReadParams,
    ids: Sequence[str],
    *,
    has_template: bool,
) -> Reads:
    """Tokenize the prompts of `questions`, and make a stream for each, with these `ids`. A chat template has written
    the special tokens; other prompts get those that the tokenizer adds before a text. Raises RequestError."""
    tokenizer = factory.tokenizer
    if tokenizer is None:
        raise RequestError("decisions are about a text, which needs a tokenizer, and this model has none")
    encode = tokenizer.encode
    longest = max(range(len(questions)), key=lambda index: len(text.rests[index]))
    check_text(text.whole(longest), tokenizer, factory.limits.max_model_len, SamplingParams())
    prompts = encoded(text, lambda part: encode(part, add_special_tokens=False))
    labels = label_ids(tokenizer, text.whole(0), prompts[0], questions)
    before: list[int] = []
    if not has_template:
        (placed,) = tokenizer.placed_batch(["x"])
        before = placed.token_ids[: placed.num_added()[0]]
    # Recurrent layers save their state where prompts diverge.
    num_alike = number_alike(prompts) if len(prompts) > 1 else 0
    marks = [num_alike + len(before)] if num_alike else None
    streams = []
    for question, prompt, options, name in zip(questions, prompts, labels, ids, strict=True):
        params = _params(options, given)
        try:
            streams.append(factory.make(TokensPrompt(prompt_token_ids=[*before, *prompt], marks=marks), params, name))
        except RequestError as error:
            if len(questions) == 1:
                raise
            error.args = (f"question {question.id!r}: {error}",)
            raise
    return Reads(questions, labels, streams)


def _params(labels: LabelIds, given: ReadParams) -> SamplingParams:
    """Make greedy params, so that the sampled token is the likeliest of all. Raises RequestError."""
    try:
        return SamplingParams(
            temperature=0.0,
            max_tokens=1,
            ignore_eos=True,
            logprob_token_ids=[token_id for ids in labels for token_id in ids],
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **given,
        )
    except (TypeError, ValueError) as error:
        raise RequestError(str(error)) from error


def _read(completion: CompletionOutput, labels: LabelIds) -> tuple[list[float], Diagnostics]:
    """Return the probability of each option among all options, and the diagnostics.

    The logprobs are float32; everything is computed from them in float64, in the order of the options, so that equal
    logprobs give equal bits.
    """
    if not completion.logprobs or not completion.token_ids:
        raise RequestError("the request was aborted")
    candidates = completion.logprobs[0]
    logprobs = [[candidates[token_id].logprob for token_id in ids] for ids in labels]
    top = max(max(each) for each in logprobs)
    weights = [sum(exp(logprob - top) for logprob in each) for each in logprobs]
    total = sum(weights)
    is_label = any(completion.token_ids[0] in ids for ids in labels)
    return [weight / total for weight in weights], Diagnostics(min(1.0, exp(top) * total), is_label)
