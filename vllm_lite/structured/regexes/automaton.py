"""Automaton: finite automata over character classes, and their conversion to regular expressions."""

from collections.abc import Iterable
from dataclasses import dataclass

from vllm_lite.structured.regexes.regex_tree import NotHeldError, Ranges, chars, merged

MAX_CHARS = 30_000
"""Maximum length of a regular expression, and of each of its parts."""


@dataclass(slots=True)
class Automaton:
    """A deterministic automaton: `moves[state][i]` is the state after a character of `classes[i]`; a text that ends in
    one of `accepting` is accepted. State 0 is the start."""

    classes: tuple[Ranges, ...]
    moves: list[dict[int, int]]
    accepting: set[int]

    def accepts(self, text: str) -> bool:
        """Whether the automaton accepts `text`."""
        state = 0
        for char in text:
            code = ord(char)
            i = next(i for i, ranges in enumerate(self.classes) if any(low <= code <= high for low, high in ranges))
            state = self.moves[state][i]
        return state in self.accepting

    def pattern(self) -> str:
        """Return a regular expression, in Rust's syntax, that matches exactly the accepted texts.

        Raises NotHeldError if it becomes too long, or matches nothing.
        """
        states = self._smallest()
        return f"^(?:{_Elimination(self, states).pattern()})$"

    def _smallest(self) -> list[int]:
        """Minimize: return for each state the number of its equivalence class."""
        block = [int(state in self.accepting) for state in range(len(self.moves))]
        while True:
            rows: dict[tuple[int, ...], int] = {}
            order = range(len(self.classes))
            found = [
                rows.setdefault((block[state], *(block[row[i]] for i in order)), len(rows))
                for state, row in enumerate(self.moves)
            ]
            if len(rows) == len(set(block)):
                return found
            block = found


@dataclass(frozen=True, slots=True)
class _Part:
    """A regular expression, and whether it needs brackets when it is repeated or concatenated."""

    text: str
    is_one: bool = False
    has_choice: bool = False

    @property
    def beside(self) -> str:
        return f"(?:{self.text})" if self.has_choice else self.text

    @property
    def whole(self) -> str:
        return self.text if self.is_one else f"(?:{self.text})"


_EMPTY = _Part("")
_FIRST, _LAST = -1, -2


class _Elimination:
    """State elimination: removes the states one by one, and adds expressions for the paths through them to the
    remaining edges."""

    def __init__(self, automaton: Automaton, like: list[int]) -> None:
        self._out: dict[int, dict[int, _Part]] = {_FIRST: {like[0]: _EMPTY}, _LAST: {}}
        self._into: dict[int, set[int]] = {_FIRST: set(), _LAST: set()}
        for state, row in enumerate(automaton.moves):
            if like[state] in self._out:
                continue
            read: dict[int, list[tuple[int, int]]] = {}
            for i, target in row.items():
                read.setdefault(like[target], []).extend(automaton.classes[i])
            self._out[like[state]] = {
                target: _Part(chars(merged(ranges)), is_one=True) for target, ranges in read.items()
            }
            if state in automaton.accepting:
                self._out[like[state]][_LAST] = _EMPTY
        self._keep(self._alive())

    def _alive(self) -> set[int]:
        """Return the states on a path from the start to the end."""
        ahead = _reached(_FIRST, self._out)
        back: dict[int, set[int]] = {}
        for state in ahead:
            for target in self._out[state]:
                back.setdefault(target, set()).add(state)
        return ahead & _reached(_LAST, back)

    def _keep(self, alive: set[int]) -> None:
        if _FIRST not in alive:
            raise NotHeldError("nothing matches it")
        self._out = {
            state: {target: part for target, part in row.items() if target in alive}
            for state, row in self._out.items()
            if state in alive
        }
        self._into = {state: set() for state in self._out}
        for state, row in self._out.items():
            for target in row:
                self._into[target].add(state)

    def pattern(self) -> str:
        while len(self._out) > 2:
            self._take_out(min((state for state in self._out if state >= 0), key=self._weight))
        return self._out[_FIRST][_LAST].text

    def _weight(self, state: int) -> int:
        """Number of characters by which the expression grows if `state` is removed."""
        loop = self._out[state].get(state)
        sources = [self._out[source][state] for source in self._into[state] if source != state]
        targets = [part for target, part in self._out[state].items() if target != state]
        text = sum(len(part.text) for part in sources) * (len(targets) - 1)
        text += sum(len(part.text) for part in targets) * (len(sources) - 1)
        return text + (0 if loop is None else len(loop.text) * (len(sources) * len(targets) - 1))

    def _take_out(self, state: int) -> None:
        row = self._out.pop(state)
        loop = row.pop(state, None)
        again = _EMPTY if loop is None else _Part(f"{loop.whole}*", is_one=True)
        sources = self._into.pop(state) - {state}
        for target in row:
            self._into[target].discard(state)
        for source in sources:
            before = self._out[source].pop(state)
            for target, behind in row.items():
                way = _behind(before, again, behind)
                known = self._out[source].get(target)
                self._out[source][target] = way if known is None else _either(known, way)
                self._into[target].add(source)


def _behind(*parts: _Part) -> _Part:
    some = [part for part in parts if part.text]
    return some[0] if len(some) == 1 else _checked(_Part("".join(part.beside for part in some)))


def _either(one: _Part, other: _Part) -> _Part:
    if one == other:
        return one
    if not one.text or not other.text:
        return _checked(_Part(f"{(other if not one.text else one).whole}?"))
    return _checked(_Part(f"{one.text}|{other.text}", has_choice=True))


def _checked(part: _Part) -> _Part:
    if len(part.text) > MAX_CHARS:
        raise NotHeldError("without look-around it becomes too long")
    return part


def _reached(start: int, edges: "dict[int, dict[int, _Part]] | dict[int, set[int]]") -> set[int]:
    seen, waiting = {start}, [start]
    for state in waiting:
        targets: Iterable[int] = edges.get(state, ())
        for target in targets:
            if target not in seen:
                seen.add(target)
                waiting.append(target)
    return seen
