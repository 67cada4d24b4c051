"""Entities: labeled spans of a text, from the logits of its tokens.

Aggregation strategies are those of transformers' pipeline, by their names, and "viterbi", the likeliest path through
the tags of spans, for models whose labels are such tags (tag_paths.py).
"""

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import exp
from typing import Literal, NamedTuple, get_args

from vllm_lite.client.pooling import PoolingRequestOutput, PoolingStream
from vllm_lite.client.tag_paths import SpanTags, best_spans
from vllm_lite.client.text.tokenizer import Placed, Tokenizer
from vllm_lite.errors import RequestError
from vllm_lite.protocol.pooling import PoolerInfo

Aggregation = Literal["none", "simple", "first", "average", "max", "viterbi"]
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
BACKGROUND = ("O",)
"""Default labels of tokens outside of entities."""


@dataclass(frozen=True, slots=True)
class Entity:
    """A part of a text: its characters [start, end), which are `text`. `score`: the mean probability of its tokens'
    labels."""

    label: str
    score: float
    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class TokenClassificationOutput:
    """Entities of one text, in order."""

    entities: list[Entity]
    text: str

    @property
    def redacted(self) -> str:
        """The text with each entity replaced by its label, as <LABEL>."""
        return redacted(self.text, self.entities)


def redacted(text: str, entities: Iterable[Entity]) -> str:
    """Replace each entity in `text` by its label, as <LABEL>. A character in two entities belongs to the first."""
    parts, done = list[str](), 0
    for entity in entities:
        if entity.end > done:
            parts += [text[done : max(entity.start, done)], f"<{entity.label.upper()}>"]
            done = entity.end
    return "".join([*parts, text[done:]])


class _Token(NamedTuple):
    """A token of the text itself, with a number for each label."""

    start: int
    end: int
    logits: list[float]
    goes_on: bool
    """Whether the token belongs to the same word as the token before."""


class _Labeled(NamedTuple):
    """A token or a word with its label."""

    label: str
    start: int
    end: int
    score: Callable[[], float]
    """Computes the probability; rarely called, as most tokens are background."""


class EntityFinder:
    """Finds entities in texts, for one model and one aggregation strategy."""

    def __init__(
        self,
        pooler: PoolerInfo,
        tokenizer: Tokenizer | None,
        aggregation: str | None,
        ignored: Collection[str] = BACKGROUND,
    ) -> None:
        """`aggregation` None: viterbi if the labels are tags of spans, else simple. Raises RequestError."""
        if tokenizer is None:
            raise RequestError("entities have places in a text, and this model has no tokenizer")
        self._labels, self._biases, self._tokenizer = pooler.labels, pooler.tag_biases, tokenizer
        self._tags = SpanTags.of(pooler.labels)
        self._ignored = frozenset(ignored)
        if aggregation is None:
            aggregation = "simple" if self._tags is None else "viterbi"
        if aggregation not in AGGREGATIONS:
            known = ", ".join(AGGREGATIONS)
            raise RequestError(f"aggregation_strategy must be one of {known}, got {str(aggregation)[:64]!r}")
        if aggregation == "viterbi" and self._tags is None:
            raise RequestError(
                "aggregation_strategy viterbi needs the labels B-, I-, E- and S- of each kind of span and one for the "
                "rest; this model has others"
            )
        self.aggregation = aggregation

    def entities(self, text: str, placed: Placed, numbers: "array[float]") -> list[Entity]:
        """Find the entities of a text. `numbers`: logits [tokens, labels], including special tokens."""
        if self.aggregation == "viterbi":
            return list(self._spans(text, placed, numbers))
        tokens = self._tokens(text, placed, numbers)
        if self.aggregation in ("none", "simple"):
            labeled = (self._labeled([token], _by_first) for token in tokens)
        else:
            rule = _RULES[self.aggregation]
            labeled = (self._labeled(word, rule) for word in _words(tokens))
        if self.aggregation == "none":
            return [_entity(text, each.label, [each]) for each in labeled if each.label not in self._ignored]
        found = ((group[0].label.split("-", 1)[-1], group) for group in _groups(labeled))
        return [_entity(text, kind, group) for kind, group in found if kind not in self._ignored]

    def _tokens(self, text: str, placed: Placed, numbers: "array[float]") -> Iterator[_Token]:
        """Yield the tokens without those that a post-processor has added."""
        size, by_word = len(self._labels), self.aggregation in _RULES
        for place, (start, end) in enumerate(placed.offsets):
            if placed.is_added[place]:
                continue
            row = numbers[place * size : (place + 1) * size].tolist()
            yield _Token(start, end, row, by_word and self._goes_on(text, placed.token_ids[place], start, end))

    def _goes_on(self, text: str, token_id: int, start: int, end: int) -> bool:
        """Whether a token is not the first of a word: its spelling has the prefix with which the vocabulary marks such
        tokens, or, without such a prefix, there is no blank at its beginning or before it."""
        if token_id == self._tokenizer.unknown_id:
            return False
        if self._tokenizer.marks_subwords:
            return len(self._tokenizer.token(token_id) or "") != len(text[start:end])
        return start > 0 and " " not in text[start - 1 : start + 1]

    def _labeled(self, word: list[_Token], rule: "_Rule") -> _Labeled:
        label, score = rule(word)
        return _Labeled(self._labels[label], word[0].start, word[-1].end, score)

    def _spans(self, text: str, placed: Placed, numbers: "array[float]") -> Iterator[Entity]:
        """Spans of the likeliest path, without the blanks at their ends."""
        tags, size = self._tags, len(self._labels)
        own = [place for place, added in enumerate(placed.is_added) if not added]
        if tags is None or not own:
            return
        numbers = numbers[own[0] * size : (own[-1] + 1) * size]
        for kind, first, end in best_spans(numbers, tags, size, self._biases):
            if kind in self._ignored:
                continue
            begin, inside, last, single = tags.kinds[kind]
            path = [single] if end == first + 1 else [begin, *[inside] * (end - first - 2), last]
            rows = (numbers[token * size : (token + 1) * size].tolist() for token in range(first, end))
            score = sum(_probabilities(row)[label] for row, label in zip(rows, path, strict=True)) / len(path)
            from_char, to_char = placed.offsets[own[first]][0], placed.offsets[own[end - 1]][1]
            part = text[from_char:to_char]
            from_char += len(part) - len(part.lstrip())
            if part := part.strip():
                yield Entity(kind, score, from_char, from_char + len(part), part)


def texts_of(given: str | Sequence[str]) -> list[str]:
    """Make a list of one or several texts. Raises RequestError for other types."""
    several = [given] if isinstance(given, str) else list(given)
    if not all(isinstance(text, str) for text in several):
        raise RequestError("token_classify() takes a text or a list of texts: entities have places in a text")
    return several


def classified(stream: PoolingStream, finder: EntityFinder) -> PoolingRequestOutput:
    """Result of a finished request of PoolingFactory.make_placed."""
    text, placed = stream.prompt.text, stream.placed
    if text is None or placed is None:
        raise ValueError("entities need a text, and a tokenizer that knows the offsets of its tokens")
    found = TokenClassificationOutput(finder.entities(text, placed, array("f", stream.data)), text)
    return PoolingRequestOutput(stream.request_id, found, stream.prompt.token_ids, text, stream.num_cached_tokens)


# ---- Words: one label of several tokens


_Rule = Callable[[list[_Token]], tuple[int, Callable[[], float]]]
"""Number of a word's label, and its probability."""


def _probabilities(logits: list[float]) -> list[float]:
    most = max(logits)
    weights = [exp(each - most) for each in logits]
    total = sum(weights)
    return [weight / total for weight in weights]


def _by_first(word: list[_Token]) -> tuple[int, Callable[[], float]]:
    logits = word[0].logits
    label = logits.index(max(logits))
    return label, lambda: _probabilities(logits)[label]


def _by_max(word: list[_Token]) -> tuple[int, Callable[[], float]]:
    """The label of the token with the highest probability."""
    if len(word) == 1:
        return _by_first(word)
    return _by_first([max(word, key=lambda token: max(_probabilities(token.logits)))])


def _by_average(word: list[_Token]) -> tuple[int, Callable[[], float]]:
    """The label with the highest mean probability."""
    if len(word) == 1:
        return _by_first(word)
    rows = (_probabilities(token.logits) for token in word)
    means = [sum(column) / len(word) for column in zip(*rows, strict=True)]
    label = means.index(max(means))
    return label, lambda: means[label]


_RULES: dict[str, _Rule] = {"first": _by_first, "average": _by_average, "max": _by_max}


def _words(tokens: Iterable[_Token]) -> Iterator[list[_Token]]:
    word = list[_Token]()
    for token in tokens:
        if word and not token.goes_on:
            yield word
            word = []
        word.append(token)
    if word:
        yield word


# ---- Groups: consecutive tokens with labels of one kind


def _groups(labeled: Iterable[_Labeled]) -> Iterator[list[_Labeled]]:
    """Group consecutive tokens of one kind, of which only the first may be marked as a beginning."""
    group = list[_Labeled]()
    for each in labeled:
        begins, kind = _kind(each.label)
        if group and (begins or kind != _kind(group[-1].label)[1]):
            yield group
            group = []
        group.append(each)
    if group:
        yield group


def _kind(label: str) -> tuple[bool, str]:
    """Return whether a label marks a beginning, and its kind without the prefixes B- and I-."""
    return label.startswith("B-"), label[2:] if label.startswith(("B-", "I-")) else label


def _entity(text: str, label: str, group: Sequence[_Labeled]) -> Entity:
    start, end = group[0].start, group[-1].end
    score = sum(each.score() for each in group) / len(group)
    return Entity(label, score, start, end, text[start:end])
