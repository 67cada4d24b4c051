"""Processor time of the suite by folder and file, children included: `make test ARGS="-p tests.costs"`.

Wall time says little about two processes that share two cores with the servers that they start. But the excess of wall
time over processor time is waiting, so the files that wait longest are listed, too, and the files that make a test
process grow. A child counts once it has been waited for: a server of a whole file does so in the last of its tests.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

KEY = "costs"
MOST_FILES = 40

PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20
Cost = tuple[float, float, float, float]
"""Seconds: wall, this process' processor time, and that of its children. And MiB of this process' memory."""
_BEGUN = pytest.StashKey[Cost]()


def now() -> Cost:
    times = os.times()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_MIB
    return times.elapsed, times.user + times.system, times.children_user + times.children_system, resident


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    item.stash[_BEGUN] = now()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Attach a test's cost to its report, which is sent to the process that prints all costs."""
    try:
        return (yield)
    finally:
        begun: Cost = item.stash[_BEGUN]
        cost = [round(end - begin, 3) for begin, end in zip(begun, now(), strict=True)]
        item.user_properties.append((KEY, cost))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    folders, files = defaultdict[str, list[list[float]]](list), defaultdict[str, list[list[float]]](list)
    for reports in terminalreporter.stats.values():
        for report in reports:
            cost = dict(getattr(report, "user_properties", ())).get(KEY)
            if cost is not None and getattr(report, "when", "") == "teardown":
                file = report.nodeid.partition("::")[0]
                files[file].append(cost)
                folders[os.path.dirname(file)].append(cost)
    sums: dict[str, list[float]] = {
        name: [sum(each) for each in zip(*costs, strict=True)] for name, costs in (folders | files).items()
    }

    def show(title: str, names: Iterable[str]) -> None:
        terminalreporter.section(f"{title}: seconds own, children's, wall; MiB; tests")
        for name in names:
            wall, own, children, grown = sums[name]
            count = len((folders | files)[name])
            terminalreporter.write_line(f"{own:8.1f} {children:8.1f} {wall:8.1f} {grown:8.0f} {count:6} {name}")

    def waited(file: str) -> float:
        wall, own, children, _ = sums[file]
        return wall - own - children

    show("folders", sorted(folders))
    show("most processor time", sorted(files, key=lambda file: -sum(sums[file][1:3]))[:MOST_FILES])
    show("longest waits", sorted(files, key=lambda file: -waited(file))[:MOST_FILES])
    show("most memory", sorted(files, key=lambda file: -sums[file][3])[: MOST_FILES // 2])
