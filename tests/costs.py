"""Processor time of the suite by folder and file, children included: `make test ARGS="-p tests.costs"`.

Wall time says little of two processes that share two cores with the servers that they start. A child counts once it
has been waited for: a server of a whole file does so in the last of its tests.
"""

import os
from collections import defaultdict
from collections.abc import Iterator

import pytest

KEY = "costs"
MOST_FILES = 40

Cost = tuple[float, float, float]
"""Seconds: wall, this process' processor time, and that of its children."""
_BEGUN = pytest.StashKey[Cost]()


def now() -> Cost:
    times = os.times()
    return times.elapsed, times.user + times.system, times.children_user + times.children_system


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    item.stash[_BEGUN] = now()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Its report, which is made next, takes the cost along to the process that prints them all."""
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
    terminalreporter.section("processor time, seconds: own, children's, wall, tests")
    dearest = sorted(files, key=lambda file: -sum(own + children for _, own, children in files[file]))
    for name, costs in [*sorted(folders.items()), *((file, files[file]) for file in dearest[:MOST_FILES])]:
        wall, own, children = (sum(values) for values in zip(*costs, strict=True))
        terminalreporter.write_line(f"{own:8.1f} {children:8.1f} {wall:8.1f} {len(costs):6} {name}")
