"""The little language of the demo model: one grammar that both writes text and checks it.

The generator fills the slots of sentence templates (``plots``); the checker turns the same templates into patterns
and unifies their variables over a whole document. So agreement (a name and its pronoun, an animal and its home, the
lost kite that is found again) is one rule: each variable must keep at least one record that explains everything read so
far, and two variables of a document over one table (two names, two spots within a sentence) must not mean the same
record. A document keeps to one plot, goes through its stages in order, and says no sentence twice.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache

from plots import ASK, CLOSE, HOWTOS, MEET, OPEN, SHORT, STORIES
from words import TABLES, VARIABLES, Record

BOS, EOS, USER, ASSISTANT, END = "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = (BOS, EOS, USER, ASSISTANT, END)
MAX_SENTENCE_CHARS = 220  # a longer run without a boundary counts as one refused sentence

_EMOJI = "[\U0001f300-\U0001faff\u2600-\u27bf\u26f5]"
_SLOT = re.compile(r"\{(\w+)(?:\.(\w+))?\}")
_TAIL_EMOJI = re.compile(rf" (?:\{{kind\.emoji\}}|{_EMOJI})$")
_BOUNDARY = re.compile(rf"[.!?:](?: {_EMOJI})?(?=\s*(?:[^\W\d_a-z]|“|$))")
_SPECIAL = re.compile("(" + "|".join(map(re.escape, SPECIAL_TOKENS)) + ")")

Bindings = dict[str, frozenset[int]]  # variable -> records it may still mean


@dataclass(frozen=True)
class Stage:
    """Alternatives at one point of a plot, and how many of them a document uses."""

    templates: tuple[str, ...]
    low: int = 1
    high: int = 1


@dataclass(frozen=True)
class Plot:
    """A kind of document. ``asks`` are the requests that a chat puts before it."""

    asks: tuple[str, ...]
    stages: tuple[Stage, ...]


def table_of(variable: str) -> list[Record]:
    """The records that a variable ranges over: ``_food2`` -> ``foods``."""
    base = variable.strip("_0123456789")
    return TABLES[VARIABLES.get(base, base + "s")]


def form_of(record: Record, form: str) -> str:
    """One string of a record; a capital form name asks for a capital letter."""
    text = record[form.lower()]
    return text[0].upper() + text[1:] if form[0].isupper() else text


# ---- reading the plots -----------------------------------------------------------------------------------------------


def _stages(text: str) -> tuple[tuple[str, ...], tuple[Stage, ...]]:
    """Read a plot's text: the requests of its ``user`` stage (if it has one), and its other stages."""
    asks: tuple[str, ...] = ()
    stages = []
    for block in text.strip().split("\n\n"):
        lines = MEET.strip().split("\n") if block.strip() == "@meet" else block.strip().split("\n")
        if lines[0] == "user":
            asks = tuple(lines[1:])
        elif count := re.fullmatch(r"(\d)-(\d)", lines[0]):
            stages.append(Stage(tuple(lines[1:]), int(count[1]), int(count[2])))
        else:
            stages.append(Stage(tuple(lines)))
    return asks, tuple(stages)


def _story_plot(text: str) -> Plot:
    own_ask, body = text.strip().split("\n\n", 1)
    asks, _ = _stages(ASK)
    _, stages = _stages(f"{OPEN}\n\n{body}\n\n{CLOSE}".replace("\n\n\n", "\n\n"))
    return Plot(asks + (own_ask,) * 8, stages)  # the plot's own request is asked more often than the general ones


def _howto_plot(row: str) -> Plot:
    head, *step_lines, closing = row.strip().split("\n")
    goal, needs = (cell.strip() for cell in head.split("|"))
    first, *middle, last = (step.strip() for step in " ".join(map(str.strip, step_lines)).split(";"))
    asks = (
        f"How do I {goal}?",
        f"How to {goal}?",
        f"Can you tell me how to {goal}?",
        f"Teach me to {goal}.",
        f"How can I {goal}?",
    )
    lines = [
        (f"How to {goal}:", f"Here is how to {goal}:"),
        (f"You will need {needs}.", f"For this you need {needs}."),
        (f"First, {first}.",),
        *((f"{{_conn}}, {step}.",) for step in middle),
        (f"Finally, {last}.",),
        (closing,),
    ]
    return Plot(asks, tuple(Stage(templates) for templates in lines))


def _load_plots() -> dict[str, Plot]:
    plots = {f"story {name}": _story_plot(text) for name, text in STORIES.items()}
    plots |= {f"howto {row.split('|')[0].strip()}": _howto_plot(row) for row in HOWTOS.strip().split("\n\n")}
    return plots | {f"short {name}": Plot(*_stages(text)) for name, text in SHORT.items()}


PLOTS = _load_plots()
STORY_PLOTS = [name for name in PLOTS if name.startswith("story")]
HOWTO_PLOTS = [name for name in PLOTS if name.startswith("howto")]
LOOK_UPS = ["short sum", "short capital"]  # asked more often than the other talk, because they are harder to learn
TALK_PLOTS = [name for name, plot in PLOTS.items() if name.startswith("short") and plot.asks]


# ---- writing ---------------------------------------------------------------------------------------------------------


class Writer:
    """Writes one document. It remembers the meanings of variables, so that later sentences agree with earlier ones."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.meaning: dict[str, int] = {}

    def sentence(self, template: str) -> str:
        """Fill one template, choosing records for the variables that are new."""
        if (tail := _TAIL_EMOJI.search(template)) and self.rng.random() < 0.4:
            template = template[: tail.start()]
        local: dict[str, int] = {}

        def fill(slot: re.Match[str]) -> str:
            variable, form = slot[1], slot[2] or "name"
            scope = local if variable.startswith("_") else self.meaning
            table = table_of(variable)
            if variable not in scope:
                taken = {index for name, index in scope.items() if table_of(name) is table}
                scope[variable] = self.rng.choice([index for index in range(len(table)) if index not in taken])
            return form_of(table[scope[variable]], form)

        return _SLOT.sub(fill, template)

    def ask(self, plot: Plot) -> str:
        """A request for the plot; now and then in the careless spelling that people type."""
        text = self.sentence(self.rng.choice(plot.asks))
        if self.rng.random() < 0.25:
            text = text[0].lower() + text[1:].rstrip(".?!")
        return text

    def body(self, plot: Plot) -> str:
        """The plot itself, from its first to its last stage."""
        lines = []
        for stage in plot.stages:
            count = self.rng.randint(stage.low, stage.high)
            if len(stage.templates) > count:
                chosen = self.rng.sample(stage.templates, count)
            else:
                chosen = [self.rng.choice(stage.templates) for _ in range(count)]
            for template in chosen:
                text = self.sentence(template)
                if text not in lines:
                    lines.append(text)
        return "".join(line + ("\n" if line.endswith(":") else " ") for line in lines).strip()


def write_plain(rng: random.Random) -> str:
    """A story, how-to, introduction or list of facts, without special tokens."""
    kinds = [STORY_PLOTS, HOWTO_PLOTS, ["short intro"], ["short facts"]]
    names = rng.choices(kinds, weights=[60, 22, 12, 6])[0]
    return Writer(rng).body(PLOTS[rng.choice(names)])


def write_exchange(rng: random.Random) -> tuple[str, str]:
    """A request and its answer."""
    plot = PLOTS[rng.choice(rng.choices([STORY_PLOTS, HOWTO_PLOTS, TALK_PLOTS, LOOK_UPS], weights=[34, 16, 25, 25])[0])]
    writer = Writer(rng)
    return writer.ask(plot), writer.body(plot)


def write_document(rng: random.Random) -> str:
    """A training document with its special tokens: plain text, or a chat of one to four exchanges."""
    if rng.random() < 0.5:
        return f"{BOS}{write_plain(rng)}{EOS}"
    exchanges = (write_exchange(rng) for _ in range(rng.choices([1, 2, 3, 4], weights=[4, 3, 2, 1])[0]))
    return BOS + "".join(f"{USER}{ask}{END}{ASSISTANT}{answer}{END}" for ask, answer in exchanges) + EOS


# ---- checking --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Production:
    """A template as a pattern, with the places (plot, stage) where it is allowed; stage 0 is a request."""

    pattern: re.Pattern[str]
    slots: tuple[tuple[str, str], ...]  # one (variable, form) a group
    places: tuple[tuple[str, int], ...]


@cache
def _readings(variable: str, form: str) -> dict[str, frozenset[int]]:
    """Every string a slot may show -> the records that show it so. Keys are folded: patterns decide about case."""
    readings: dict[str, set[int]] = {}
    for index, record in enumerate(table_of(variable)):
        readings.setdefault(form_of(record, form).casefold(), set()).add(index)
    return {text: frozenset(indices) for text, indices in readings.items()}


def _compile(template: str, places: tuple[tuple[str, int], ...]) -> Production:
    request = places[0][1] == 0
    tail = _TAIL_EMOJI.search(template)
    body, optional = (template[: tail.start()], template[tail.start() :]) if tail else (template, "")
    if request:
        body = body.rstrip(".?!")
    slots: list[tuple[str, str]] = []

    def pattern(text: str) -> str:
        parts, end = [], 0
        for slot in _SLOT.finditer(text):
            variable, form = slot[1], slot[2] or "name"
            slots.append((variable, form))
            shown = sorted({form_of(record, form) for record in table_of(variable)}, key=len, reverse=True)
            parts += [re.escape(text[end : slot.start()]), "(" + "|".join(map(re.escape, shown)) + ")"]
            end = slot.end()
        return "".join(parts) + re.escape(text[end:])

    source = pattern(body) + ("[.?!]?" if request else f"(?:{pattern(optional)})?" if optional else "")
    return Production(re.compile(source, re.IGNORECASE if request else 0), tuple(slots), places)


def _load_productions() -> list[Production]:
    places: dict[tuple[str, bool], list[tuple[str, int]]] = {}
    for name, plot in PLOTS.items():
        for number, templates in enumerate([plot.asks, *(stage.templates for stage in plot.stages)]):
            for template in dict.fromkeys(templates):
                places.setdefault((template, number == 0), []).append((name, number))
    return [_compile(template, tuple(where)) for (template, _), where in places.items()]


PRODUCTIONS = _load_productions()


def _unify(first: Bindings, second: Bindings) -> Bindings | None:
    """Unify the bindings of both, or return None where they disagree."""
    merged = dict(first)
    for variable, records in second.items():
        merged[variable] = merged.get(variable, records) & records
        if not merged[variable]:
            return None
    known: set[tuple[bool, int, int]] = set()  # (local, table, record): no record may be meant twice
    for variable, records in merged.items():
        if len(records) == 1:
            key = (variable.startswith("_"), id(table_of(variable)), next(iter(records)))
            if key in known:
                return None
            known.add(key)
    return merged


@lru_cache(maxsize=65536)
def _parse(sentence: str) -> tuple[tuple[Production, Bindings], ...]:
    """All productions that can write the sentence, each with the meanings that it gives to variables."""
    found = []
    for production in PRODUCTIONS:
        if match := production.pattern.fullmatch(sentence):
            bindings: Bindings | None = {}
            for (variable, form), text in zip(production.slots, match.groups(), strict=True):
                if text is not None and bindings is not None:
                    bindings = _unify(bindings, {variable: _readings(variable, form)[text.casefold()]})
            if bindings is not None:
                found.append((production, bindings))
    return tuple(found)


@dataclass(frozen=True)
class State:
    """One way to understand a document so far."""

    plot: str
    stage: int
    meaning: Bindings = field(hash=False)

    def follow(self, plot: str, stage: int, bindings: Bindings) -> State | None:
        """The state after one more sentence, or None if the sentence does not fit. A request never fits."""
        if plot != self.plot or stage < max(self.stage, 1):
            return None
        merged = _unify(self.meaning, bindings)
        return None if merged is None else State(plot, stage, _lasting(merged))


def _lasting(bindings: Bindings) -> Bindings:
    return {variable: records for variable, records in bindings.items() if not variable.startswith("_")}


class Checker:
    """Reads a document sentence by sentence, and keeps all states that are still possible."""

    def __init__(self) -> None:
        self.states: list[State] = []
        self.said: set[str] = set()
        self.anywhere = True  # text may begin in the middle of a document, but after a special token it may not

    def restart(self) -> None:
        """A special token said that a new document or exchange begins."""
        self.states, self.said, self.anywhere = [], set(), False

    def feed(self, sentence: str) -> bool:
        """Advance by one sentence. Returns whether the document may continue with it.

        A refused sentence changes nothing, unless it belongs to another plot: then the document continues in that plot,
        so that one wrong change of plot counts once.
        """
        places = [(place, bindings) for production, bindings in _parse(sentence) for place in production.places]
        later = [state.follow(*place, bindings) for state in self.states for place, bindings in places]
        states = [state for state in later if state is not None]
        if states and sentence not in self.said:
            self.said.add(sentence)
            self.states = states
            return True
        fresh = self.anywhere and not self.states
        opened = [(place, bindings) for place, bindings in places if fresh or place[1] <= 1]
        known = {state.plot for state in self.states}
        if opened or not known & {place[0] for place, _ in places}:
            self.said = {sentence}
            self.states = [State(*place, _lasting(bindings)) for place, bindings in opened or places] or self.states
        return bool(opened)


def split_sentences(text: str) -> Iterator[str]:
    """The complete sentences of a text; an unfinished last one is left out unless it is too long to become one."""
    start = 0
    for match in _BOUNDARY.finditer(text):
        sentence = text[start : match.end()].strip()
        if sentence.count("“") == sentence.count("”") or len(sentence) > MAX_SENTENCE_CHARS:
            yield sentence
            start = match.end()
    if len(rest := text[start:].strip()) > MAX_SENTENCE_CHARS:
        yield rest


def judge(text: str) -> Iterator[tuple[str, bool]]:
    """Every complete sentence of a text with the verdict on it; special tokens may show in the text."""
    checker, request = Checker(), False
    segments = _SPECIAL.split(text)
    if segments[-2:-1] == [USER]:
        segments.pop()  # a request that is not finished: the text was cut off
    for segment in segments:
        if segment in (BOS, EOS, USER):
            checker.restart()
        if segment in SPECIAL_TOKENS:
            request = segment == USER
        elif request and segment.strip():
            yield segment.strip(), checker.feed(segment.strip())
        else:
            for sentence in split_sentences(segment):
                yield sentence, checker.feed(sentence)


def check_text(text: str) -> tuple[int, int]:
    """Count the complete sentences of a text that the grammar accepts in their place, and all of them."""
    verdicts = [accepted for _, accepted in judge(text)]
    return sum(verdicts), len(verdicts)


def accepts(sentence: str) -> bool:
    """Whether some production writes this sentence, agreement within it included."""
    return bool(_parse(sentence.strip()))
