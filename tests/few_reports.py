"""Plugin for xdist's worker processes: they send the main process only the reports that it counts or shows.

Most tests then take three messages (a report, the end of the test, a request for the next) instead of six.
"""

import pytest
from _pytest.runner import runtestprotocol  # as pytest-rerunfailures does

SHOWN_S = 0.005
"""Duration below which `--durations` hides a report."""


def is_of_interest(report: pytest.TestReport) -> bool:
    """Tell whether a report is more than a setup or teardown that passed at once."""
    is_plain = report.passed and not report.sections and not report.user_properties
    return report.when == "call" or not is_plain or report.duration >= SHOWN_S


class FewReports:
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        for report in runtestprotocol(item, log=False, nextitem=nextitem):
            if is_of_interest(report):
                item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True
