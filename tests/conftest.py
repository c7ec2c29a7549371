"""Fixtures of several test modules, and the option that .ci/run uses to forbid skips."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_book import TinyBook


def pytest_addoption(parser):
    parser.addoption("--no-skips", action="store_true", help="fail when a test was skipped")


class SkipWatch:
    """Counts skipped tests and turns them into a failed session."""

    def __init__(self):
        self.skipped: list[str] = []

    def pytest_runtest_logreport(self, report):
        if report.skipped and not hasattr(report, "wasxfail"):
            self.skipped.append(report.nodeid)

    def pytest_collectreport(self, report):
        if report.skipped:
            self.skipped.append(report.nodeid)

    def pytest_sessionfinish(self, session):
        if self.skipped and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        for nodeid in self.skipped:
            terminalreporter.write_line(f"skipped, which --no-skips forbids: {nodeid}", red=True)


def pytest_configure(config):
    if config.getoption("--no-skips") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SkipWatch())


@pytest.fixture
def tiny(tmp_path: Path) -> TinyBook:
    """A fresh project whose only chapter is `tiny`."""
    return TinyBook.create(tmp_path / "project")
