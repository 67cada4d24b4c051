"""Places where processes kill themselves: a file with a line for every future death, "WHO|WHERE|TIMES", the next one
first.

WHO is "engine" or "worker RANK", WHERE the name of a point, and TIMES the number of times that one process has to reach
this point to die. Only the first line counts. A process removes the line before it dies, so that the next line applies
then.
"""

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

VARIABLE = "KILL_PLAN"
"""The environment variable that names the file."""


class Death(NamedTuple):
    who: str
    where: str
    times: int = 1

    def __str__(self) -> str:
        return f"{self.who}|{self.where}|{self.times}"

    @classmethod
    def parse(cls, line: str) -> "Death":
        who, where, times = line.split("|")
        return cls(who, where, int(times))


class Plan:
    """The file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[Death]:
        return [Death.parse(line) for line in self.path.read_text().splitlines()]

    def write(self, deaths: Iterable[Death]) -> None:
        """Replace the file in one operation, so that no reader sees a part of it."""
        draft = self.path.with_suffix(f".{os.getpid()}")
        draft.write_text("".join(f"{death}\n" for death in deaths))
        draft.rename(self.path)


class Points:
    """The points of one process."""

    def __init__(self, who: str) -> None:
        self.who = who
        self.plan = Plan(Path(os.environ[VARIABLE]))
        self.passed: Counter[str] = Counter()
        self.first: Death | None = None

    def is_next(self, where: str) -> bool:
        """Whether the process is to die here, now or at a later time."""
        deaths = self.plan.read()
        if deaths[:1] != [self.first]:  # another line counts from now on
            self.first = deaths[0] if deaths else None
            self.passed.clear()
        return self.first is not None and self.first[:2] == (self.who, where)

    def reach(self, where: str) -> None:
        if not self.is_next(where) or self.first is None:
            return
        self.passed[where] += 1
        if self.passed[where] == self.first.times:
            self.plan.write(self.plan.read()[1:])
            os.kill(os.getpid(), signal.SIGKILL)

    def before(self, owner: Any, name: str, where: str) -> None:
        """Calls of `owner.name` come to `where` first."""
        self.around(owner, name, lambda *_: self.reach(where), None)

    def after(self, owner: Any, name: str, where: str) -> None:
        """Calls of `owner.name` come to `where` when they have returned."""
        self.around(owner, name, None, lambda *_: self.reach(where))

    def around(
        self, owner: Any, name: str, first: Callable[..., None] | None, then: Callable[..., None] | None
    ) -> None:
        """Have `owner.name` call `first(arguments)`, and in the end `then(arguments, result)`."""
        original = getattr(owner, name)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            if first is not None:
                first(arguments)
            result = original(*arguments, **options)
            if then is not None:
                then(arguments, result)
            return result

        setattr(owner, name, wrapped)


def kind(message: Any) -> str:
    """The name of a message's type; one name for both kinds of answers, and one for both messages with steps."""
    names = {"StepOutputs": "ModelOutput", "Steps": "SchedulerOutput", "NoneType": "Shutdown"}
    name = type(message).__name__
    return names.get(name, name)
