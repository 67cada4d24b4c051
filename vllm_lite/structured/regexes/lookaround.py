"""Converts regular expressions with look-around to automata, and so to equivalent expressions without it.

A pattern becomes a graph whose nodes stand for the rest of the pattern. A state of the automaton is a formula over
nodes, true for the texts that may follow: alternatives are "or", look-ahead is "and", negative look-ahead "not".
Reading a character replaces each node by its successor formula, which yields the states one by one.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import pairwise

from vllm_lite.structured.regexes.automaton import Automaton
from vllm_lite.structured.regexes.regex_tree import (
    ALL,
    WORD,
    Ahead,
    Alt,
    Behind,
    Chars,
    Edge,
    Node,
    NotHeldError,
    Ranges,
    Repeat,
    Seq,
    holds,
)

MAX_NODES = 4000
MAX_TERMS = 512
"""Maximum number of alternatives of a formula, each a conjunction."""
MAX_STATES = 500
MAX_STEPS = 2_000_000
"""Maximum number of literals joined or compared for one automaton: about half a second."""
CALL_STEPS = 15
"""Fixed cost of a join, in literals."""

Formula = frozenset[frozenset[int]]
"""A disjunction of conjunctions of literals. A literal is the number of a node, negative if the node must not match."""
TRUE: Formula = frozenset({frozenset()})
FALSE: Formula = frozenset()
AT_END = 1
"""The literal for the end of the text."""


@dataclass(slots=True)
class _Point:
    """A node of the graph. By default it leads to each of `then` without reading a character.

    reads   the characters of which it reads one
    look    the node that must match from here, or must not if it `is_negative`
    edge    a position assertion, Edge or Behind
    """

    then: list[int] = field(default_factory=list)
    reads: Ranges | None = None
    look: int | None = None
    edge: Edge | Behind | None = None
    is_negative: bool = False


ANYTHING = 0
"""The node after the whole pattern, which matches any text."""


class _Graph:
    """The graph of one pattern. Node 1 is the literal AT_END."""

    def __init__(self) -> None:
        self.points = [_Point(), _Point()]

    def add(self, point: _Point) -> int:
        if len(self.points) >= MAX_NODES:
            raise NotHeldError("its parts are repeated too often beside look-around")
        self.points.append(point)
        return len(self.points) - 1

    def build(self, node: Node, then: int) -> int:
        """Return the node at which `node` starts, followed by `then`."""
        match node:
            case Chars(ranges):
                return self.add(_Point([then], reads=ranges))
            case Seq(parts):
                for part in reversed(parts):
                    then = self.build(part, then)
                return then
            case Alt(parts):
                return self.add(_Point([self.build(part, then) for part in parts]))
            case Repeat(part, least, most):
                return self._repeat(part, least, most, then)
            case Ahead(body, is_negative):
                return self.add(_Point([then], look=self.build(body, ANYTHING), is_negative=is_negative))
            case _:
                return self.add(_Point([then], edge=node))

    def _repeat(self, part: Node, least: int, most: int | None, then: int) -> int:
        if most is None:
            loop = self.add(_Point([then]))
            self.points[loop].then.append(self.build(part, loop))
            then = loop
        for _ in range((most or 0) - least):
            then = self.add(_Point([self.build(part, then), then]))
        for _ in range(least):
            then = self.build(part, then)
        return then


def automaton_of(tree: Node, *, is_negative: bool = False) -> Automaton:
    """Make the automaton of texts in which `tree` matches somewhere, or nowhere if it `is_negative`.

    Raises NotHeldError if it becomes too large.
    """
    graph = _Graph()
    start = graph.build(Seq((Repeat(Chars(ALL), 0, None), tree)), ANYTHING)
    return _States(graph).automaton(start, is_negative=is_negative)


class _States:
    """Constructs the states of one graph's automaton."""

    def __init__(self, graph: _Graph) -> None:
        self._points = graph.points
        self._classes, self._samples = _classes(graph.points)
        self._steps = 0
        self._reads = {
            place: frozenset(i for i, char in enumerate(self._samples) if holds(point.reads, char))
            for place, point in enumerate(graph.points)
            if point.reads is not None
        }
        self._known: dict[tuple[int, int], Formula] = {}
        self._not: dict[Formula, Formula] = {}

    def automaton(self, start: int, *, is_negative: bool) -> Automaton:
        first = self._from(start, -1)
        if is_negative:
            first = self._negated(first)
        numbers, waiting, moves = {first: 0}, [first], list[dict[int, int]]()
        accepting = set[int]()
        for formula in waiting:
            if self._ends(formula):
                accepting.add(len(moves))
            row = {}
            for i in range(len(self._samples)):
                target = self._step(formula, i)
                if target not in numbers:
                    if len(numbers) >= MAX_STATES:
                        raise NotHeldError("its automaton has too many states")
                    numbers[target] = len(numbers)
                    waiting.append(target)
                row[i] = numbers[target]
            moves.append(row)
        return Automaton(tuple(self._classes), moves, accepting)

    def _step(self, formula: Formula, i: int) -> Formula:
        """Return the formula after a character of class `i`."""
        found = set[frozenset[int]]()
        for term in formula:
            behind = TRUE
            for literal in term:
                behind = self._both(behind, self._behind(literal, i))
                if not behind:
                    break
            found |= behind
        return self._tidy(found)

    def _behind(self, literal: int, i: int) -> Formula:
        place = abs(literal)
        if place == AT_END or i not in self._reads[place]:
            return FALSE if literal > 0 else TRUE
        formula = self._from(self._points[place].then[0], i)
        return formula if literal > 0 else self._negated(formula)

    def _ends(self, formula: Formula) -> bool:
        """Whether the text may end in this state."""
        return any(all(literal == AT_END or literal < -AT_END for literal in term) for term in formula)

    def _from(self, start: int, before: int) -> Formula:
        """Return the formula of a node after a character of class `before`, -1 at the start of the text."""
        key = start, before
        if key not in self._known:
            self._known[key] = self._followed(start, before)
        return self._known[key]

    def _followed(self, start: int, before: int) -> Formula:
        """Follow all paths from a node that read no character, each with its conditions."""
        first = (start, TRUE)
        seen, waiting, found = {first}, [first], set[frozenset[int]]()
        while waiting:
            place, held = waiting.pop()
            point = self._points[place]
            if place == ANYTHING:
                found |= held
                continue
            if point.reads is not None:
                found |= self._both(held, frozenset({frozenset({place})}))
                continue
            if point.look is not None:
                looked = self._from(point.look, before)
                held = self._both(held, self._negated(looked) if point.is_negative else looked)
            elif point.edge is not None:
                held = self._both(held, self._at_edge(point.edge, before))
            for then in point.then if held else ():
                if (then, held) not in seen:
                    seen.add((then, held))
                    waiting.append((then, held))
        return self._tidy(found)

    def _at_edge(self, edge: Edge | Behind, before: int) -> Formula:
        if isinstance(edge, Behind):
            is_held = before >= 0 and holds(edge.ranges, self._samples[before])
            return TRUE if is_held != edge.is_negative else FALSE
        if edge.kind == "^":
            return TRUE if before < 0 else FALSE
        if edge.kind == "$":
            return frozenset({frozenset({AT_END})})
        is_word = before >= 0 and holds(WORD, self._samples[before])
        word = self._word()
        return self._negated(word) if is_word == (edge.kind == "b") else word

    def _word(self) -> Formula:
        """The formula for "a word character follows"."""
        if not self._word_point:
            self._points.append(_Point([ANYTHING], reads=WORD))
            self._word_point = len(self._points) - 1
            self._reads[self._word_point] = frozenset(i for i, char in enumerate(self._samples) if holds(WORD, char))
        return frozenset({frozenset({self._word_point})})

    _word_point = 0

    def _both(self, one: Formula, other: Formula) -> Formula:
        if one == TRUE:
            return other
        if other == TRUE:
            return one
        self._spend(sum(map(len, one)) * len(other) + len(one) * sum(map(len, other)))
        return self._tidy({a | b for a in one for b in other})

    def _negated(self, formula: Formula) -> Formula:
        if formula not in self._not:
            found = TRUE
            for term in formula:
                found = self._both(found, frozenset(frozenset({-literal}) for literal in term))
            self._not[formula] = found
        return self._not[formula]

    def _tidy(self, formula: Collection[frozenset[int]]) -> Formula:
        """Drop contradictory terms, redundant literals, and terms that contain one of the shortest."""
        self._spend(CALL_STEPS + sum(map(len, formula)))
        terms = {term for each in formula if (term := _tidied(each)) is not None}
        shortest = min(map(len, terms), default=0)
        small = [term for term in terms if len(term) == shortest]
        others = [term for term in terms if len(term) > shortest]
        self._spend(len(others) * len(small))
        kept = {term for term in others if not any(each < term for each in small)}
        if len(kept) + len(small) > MAX_TERMS:
            raise NotHeldError("its look-around has too many cases at once")
        return frozenset((*small, *kept))

    def _spend(self, steps: int) -> None:
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise NotHeldError("its automaton takes too long to find")


def _tidied(term: frozenset[int]) -> frozenset[int] | None:
    if any(-literal in term for literal in term):
        return None
    if AT_END in term:
        return None if any(literal > AT_END for literal in term) else frozenset({AT_END})
    if -AT_END in term and any(literal > AT_END for literal in term):
        return term - {-AT_END}
    return term


def _classes(points: list[_Point]) -> tuple[list[Ranges], list[int]]:
    """Partition all characters into classes that all nodes treat alike. Return them, and one character of each."""
    wanted = {point.reads for point in points if point.reads is not None}
    wanted |= {point.edge.ranges for point in points if isinstance(point.edge, Behind)}
    if any(isinstance(point.edge, Edge) and point.edge.kind in "bB" for point in points):
        wanted.add(WORD)
    kinds = sorted(wanted)
    starts = {first for ranges in (*kinds, ALL) for first, _ in ranges}
    starts |= {last + 1 for ranges in (*kinds, ALL) for _, last in ranges}
    found: dict[tuple[bool, ...], list[tuple[int, int]]] = {}
    ordered = sorted(starts)
    for first, end in pairwise(ordered):
        if holds(ALL, first):
            found.setdefault(tuple(holds(ranges, first) for ranges in kinds), []).append((first, end - 1))
    return [tuple(ranges) for ranges in found.values()], [ranges[0][0] for ranges in found.values()]
