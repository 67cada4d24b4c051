"""FewReports: xdist's worker processes keep back no report that the main process would count or show."""

from typing import Any

import pytest

from tests.few_reports import SHOWN_S, FewReports, is_of_interest


def report(when: Any, outcome: Any = "passed", duration: float = 0.0, **more: Any) -> pytest.TestReport:
    return pytest.TestReport("t", ("t", 1, "t"), {}, outcome, None, when, duration=duration, **more)


def test_setups_and_teardowns_that_pass_at_once_are_not_sent() -> None:
    assert not is_of_interest(report("setup"))
    assert not is_of_interest(report("teardown", duration=SHOWN_S / 2))


@pytest.mark.parametrize("when", ["setup", "teardown"])
def test_every_other_report_is_sent(when: str) -> None:
    assert is_of_interest(report("call"))
    for outcome in ("failed", "skipped"):
        assert is_of_interest(report(when, outcome))
    assert is_of_interest(report(when, duration=SHOWN_S))
    assert is_of_interest(report(when, sections=[("Captured stdout", "x")]))
    assert is_of_interest(report(when, user_properties=[("costs", [])]))


def test_it_runs_in_processes_of_xdist_alone(request: pytest.FixtureRequest) -> None:
    plugins = request.config.pluginmanager.get_plugins()
    is_child = hasattr(request.config, "workerinput") and not request.config.getoption("xmlpath")
    assert any(isinstance(plugin, FewReports) for plugin in plugins) == is_child
