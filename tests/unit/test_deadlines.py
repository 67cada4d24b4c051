"""Deadlines in tests are scaled by the speed of the machine; none is a plain number."""

import ast
import os
import re
from pathlib import Path

import pytest

from tests import deadlines
from tests.deadlines import patience, scaled


class Machine:
    """A clock, and how long the work takes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        self.work_s = deadlines.IDLE_S
        self.num_measured = 0
        monkeypatch.setattr(deadlines, "time", self)
        monkeypatch.setattr(deadlines, "measure", self.measure)
        monkeypatch.setattr(deadlines, "_measured", type(deadlines._measured)())

    def monotonic(self) -> float:
        return self.now_s

    def measure(self) -> float:
        self.num_measured += 1
        return self.work_s


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_an_idle_or_quicker_machine_keeps_the_given_deadline(machine: Machine) -> None:
    assert scaled(7.0) == 7.0
    machine.now_s += 100
    machine.work_s /= 2
    assert scaled(7.0) == 7.0


def test_a_busy_machine_is_remembered_for_a_minute(machine: Machine) -> None:
    assert scaled(7.0) == 7.0
    machine.work_s *= 3
    assert scaled(7.0) == 7.0, "it was measured a moment ago"
    machine.now_s += deadlines.EVERY_S + 1
    assert scaled(7.0) == pytest.approx(21.0)
    machine.work_s /= 3
    for _ in range(4):
        machine.now_s += deadlines.EVERY_S + 1
        assert scaled(7.0) == pytest.approx(21.0)
    machine.now_s += 2 * deadlines.EVERY_S
    assert scaled(7.0) == 7.0
    assert machine.num_measured == 7


def test_patience_grows_with_the_root(machine: Machine) -> None:
    assert patience(1.5) == 1.5
    machine.now_s += 100
    machine.work_s *= 9
    assert patience(1.5) == pytest.approx(4.5)


def test_the_work_is_done_on_all_cores_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    working: list[str] = []
    monkeypatch.setattr(deadlines, "_work", lambda: working.append("here"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3, 4})
    assert deadlines.measure() > 0
    assert len(working) == 5


def test_the_time_of_a_test_is_scaled(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("timeout") is not None:
        pytest.skip("--timeout says it")
    marker = request.node.get_closest_marker("timeout")
    assert marker.args[0] >= float(request.config.getini("timeout"))


@pytest.mark.timeout(500)
def test_the_time_that_a_test_has_of_its_own_is_scaled(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("timeout") is not None:
        pytest.skip("--timeout says it")
    taken, own = (marker.args[0] for marker in request.node.iter_markers("timeout"))
    assert own == 500
    assert taken >= own


# ---- none is a plain number

TESTS = Path(__file__).parents[1]
CONSTANT = re.compile(r"^_?[A-Z_]*(DEADLINE|TIMEOUT|READY|START|END|WAIT|PATIENCE)_M?S$")
LONG_S = 2
"""Shorter waits are meant to run out, or are the time between two polls."""
SCALED_EARLY_S = 20
"""Limits of at least this many seconds allow for changes of the machine's speed during a run."""


def plain_deadlines(tree: ast.AST) -> list[str]:
    """Find waits, and constants that look like limits, whose limit is a plain number."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            limits = [word.value for word in node.keywords if word.arg in ("timeout", "timeout_s")]
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("wait", "join", "wait_for", "wait_procs", "timeout") and "mark" not in ast.unparse(node.func):
                limits += node.args
            found += [(node.lineno, ast.unparse(node)) for limit in limits if is_long(limit)]
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None and is_long(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found += [(node.lineno, ast.unparse(node)) for target in targets if CONSTANT.match(ast.unparse(target))]
    return [f"line {line}: {text}" for line, text in sorted(found)]


def early_limits(tree: ast.Module) -> list[str]:
    """Short limits that are scaled as their file is imported, up to ten minutes before its tests run: by then the
    machine may be twice as slow."""
    found = []
    for node in tree.body:
        value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
        calls = [each for each in ast.walk(value) if isinstance(each, ast.Call)] if value is not None else []
        limits = [call.args[0] for call in calls if ast.unparse(call.func) in ("scaled", "patience")]
        if any(is_short(limit) for limit in limits):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def is_short(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, (int, float)) and value.value < SCALED_EARLY_S


def is_long(value: ast.expr) -> bool:
    """A number of seconds that somebody thought enough."""
    return isinstance(value, ast.Constant) and isinstance(value.value, (int, float)) and value.value >= LONG_S


@pytest.mark.parametrize(
    "source",
    [
        "subprocess.run(command, timeout=60)",
        "httpx.Client(timeout=30.0)",
        "session = Session.connect(address, timeout_s=5)",
        "process.wait(10)",
        "thread.join(20)",
        "await asyncio.wait_for(body, 10.0)",
        "with asyncio.timeout(9): pass",
        "READY_S = 60.0",
        "PATIENCE_MS: int = 5000",
    ],
)
def test_plain_deadlines_are_seen(source: str) -> None:
    assert plain_deadlines(ast.parse(source))


def test_short_limits_that_are_scaled_at_the_import_are_seen() -> None:
    source = "GONE_S = scaled(5.0)\nSLOW_S: str = str(patience(1))\nLONG_S = scaled(20)\ndef f(): x = scaled(2)"
    assert early_limits(ast.parse(source)) == ["line 1: GONE_S = scaled(5.0)", "line 2: SLOW_S: str = str(patience(1))"]


def test_scaled_and_short_ones_are_not() -> None:
    source = 'run(timeout=scaled(60)); event.wait(0.1); READY_S = scaled(60); ", ".join([3]); SIZE = 7; wait(END_S)'
    assert plain_deadlines(ast.parse(source)) == []


def test_no_test_has_a_plain_deadline() -> None:
    offences = [
        f"{path.relative_to(TESTS.parent)}, {offence}"
        for path in sorted(TESTS.rglob("*.py"))
        if path != Path(__file__) and not {"check", "acceptance"} & {*path.parts}  # programs
        for tree in [ast.parse(path.read_text())]
        for offence in plain_deadlines(tree) + early_limits(tree)
    ]
    if offences:
        pytest.fail("write scaled(...) of tests/deadlines.py around:\n" + "\n".join(offences), pytrace=False)
