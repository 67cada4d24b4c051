"""Reads: one request of the engine for each question. It computes the question's prompt after the shared state and
samples one token, of which only the logprobs of the labels matter.

The first question is sent alone and leaves the state in the prefix cache; then all others are sent together, and
compute only their own text.
"""

from collections.abc import Iterable, Sequence
from math import exp
from typing import TypedDict

from vllm_lite.client.decisions.answers import Answer, DecisionOutput, Diagnostics, answer_of
from vllm_lite.client.decisions.questions import Question
from vllm_lite.client.decisions.shared import SharedText, encoded, number_alike
from vllm_lite.client.outputs import CompletionOutput
from vllm_lite.client.prompt import TokensPrompt, check_text
from vllm_lite.client.streams.stream import RequestStream, StreamFactory
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.errors import RequestError
from vllm_lite.protocol.params import RequestOutputKind, SamplingParams

ENDING_CHARS = 256
"""Characters at a prompt's end that are searched for its last added token."""

LabelIds = tuple[tuple[int, ...], ...]
"""Token ids of each option of a question: of all spellings of its label that are one token."""


def label_ids(
    tokenizer: Tokenizer, text: str, token_ids: Sequence[int], questions: Sequence[Question]
) -> list[LabelIds]:
    """Find the tokens of the labels of `questions`, whose prompts all end like `text`, tokenized to `token_ids`.

    Raises RequestError for a label that is not one token there, or has the same token as another option.
    """
    ending, ending_ids = _ending(tokenizer, text, token_ids)
    space = "" if text[-1:].isspace() or any(text.endswith(each) for each in tokenizer.added_tokens if each) else " "
    known: dict[str, int | None] = {}
    found = []
    for question in questions:
        for spelling in (spelling for label in question.labels for spelling in label):
            if spelling not in known:
                ids = tokenizer.encode(ending + space + spelling, add_special_tokens=False)
                known[spelling] = ids[-1] if ids[:-1] == ending_ids else None
        options = tuple(_ids_of(label, known) for label in question.labels)
        for label, known_ids in zip(question.labels, options, strict=True):
            if not known_ids:
                raise RequestError(
                    f"question {question.id!r}: {label[0]!r} is not one token after this model's prompt, so this "
                    f"model cannot answer a {question.kind}; try another one"
                )
        if len({token_id for each in options for token_id in each}) < sum(map(len, options)):
            raise RequestError(f"question {question.id!r}: two options have the same token after this model's prompt")
        found.append(options)
    return found


def _ids_of(label: Sequence[str], known: dict[str, int | None]) -> tuple[int, ...]:
    """Distinct tokens of a label; none if its first spelling, which the prompt names, is not one token."""
    ids = [known[spelling] for spelling in label]
    return () if ids[0] is None else tuple(dict.fromkeys(each for each in ids if each is not None))


def _ending(tokenizer: Tokenizer, text: str, token_ids: Sequence[int]) -> tuple[str, list[int]]:
    """Return an end of a prompt and its tokens: a short one if it has the same tokens alone, else the whole prompt."""
    for start in _starts(tokenizer.added_tokens, text):
        ids = tokenizer.encode(text[start:], add_special_tokens=False)
        if ids and list(token_ids[-len(ids) :]) == ids:
            return text[start:], ids
    raise RequestError("the model's tokenizer makes other tokens of the same prompt")


def _starts(added: Iterable[str], text: str) -> list[int]:
    """Positions to try as the beginning of an end: the last added token, the last line, the whole text."""
    end = text[-ENDING_CHARS:]
    places = [end.rfind(each) for each in added if each]
    offset = len(text) - len(end)
    found = [offset + max(places, default=-1)] if max(places, default=-1) >= 0 else []
    line = text.rfind("\n", offset, len(text) - 1)
    return [*found, *([line] if line >= 0 else []), 0]


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
