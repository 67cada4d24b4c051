"""Answers: the probabilities of a question's options, in a form for each type. Field names are vLLM's."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from vllm_lite.client.decisions.questions import Question


class ChoiceAnswer(msgspec.Struct, frozen=True, tag_field="type", tag="choice"):
    """The likeliest option, and the probability of each by its name."""

    choice: str
    probabilities: dict[str, float]
    confidence: float


class NoulAnswer(msgspec.Struct, frozen=True, tag_field="type", tag="noul"):
    """The probability of yes."""

    noul: float
    probabilities: dict[str, float]
    confidence: float


class ScoreAnswer(msgspec.Struct, frozen=True, tag_field="type", tag="score"):
    """The expected level, counted from 0, and the probability of each. `legend` names the levels."""

    score: float
    legend: dict[str, str]
    probabilities: dict[str, float]
    confidence: float


Answer = ChoiceAnswer | NoulAnswer | ScoreAnswer


class Diagnostics(msgspec.Struct, frozen=True):
    """Facts about the token that was read, which show whether the model answers in labels.

    `label_mass` is the probability of all labels together among all tokens; `argmax_is_label` says whether the
    likeliest token of all is one of them.
    """

    label_mass: float
    argmax_is_label: bool


@dataclass(slots=True)
class DecisionOutput:
    """The answers of a request, by the ids of their questions.

    `num_prompt_tokens` counts the tokens of all questions' prompts, `num_cached_tokens` those that were cached, as all
    questions share the state.
    """

    answers: dict[str, Answer]
    diagnostics: dict[str, Diagnostics]
    num_prompt_tokens: int
    num_cached_tokens: int


def answer_of(question: Question, probabilities: Sequence[float], label_mass: float) -> Answer:
    """Make the answer of a question whose options have these `probabilities`, which add up to 1.

    Its confidence is the probability of the likeliest option among all tokens: that among the options, times
    `label_mass`.
    """
    best = max(range(len(probabilities)), key=probabilities.__getitem__)
    confidence = probabilities[best] * label_mass
    if question.kind == "score":
        levels = [str(level) for level in range(len(probabilities))]
        expected = sum(level * probability for level, probability in enumerate(probabilities))
        legend = dict(zip(levels, question.names, strict=True))
        return ScoreAnswer(expected, legend, dict(zip(levels, probabilities, strict=True)), confidence)
    by_name = dict(zip(question.names, probabilities, strict=True))
    if question.kind == "noul":
        return NoulAnswer(probabilities[0], by_name, confidence)
    return ChoiceAnswer(question.names[best], by_name, confidence)
