"""`.venv` is made once, updated to new pins, and made anew where it is half-made. No package is installed here."""

import os
import shutil
import subprocess

import pytest

from benign_attention import paths

FAKE_PYTHON = """#!/bin/sh
echo "$@" >> "$LOG"
case "$*" in
  *version_info*) exit ${OLD:-0} ;;
  "-m venv"*) rm -rf .venv; mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
  *"pip install"*) exit ${BROKEN_NETWORK:-0} ;;
esac
"""


class Project:
    """The Makefile in a folder of its own, with a Python that only writes down what it was asked."""

    def __init__(self, root):
        self.root = root
        root.mkdir()
        for name in ("Makefile", "pyproject.toml", "constraints.txt", "data-packages.txt"):
            shutil.copy(paths.ROOT / name, root / name)
        (root / "python").write_text(FAKE_PYTHON)
        (root / "python").chmod(0o755)

    def setup(self, **environment):
        """Run `make setup`; return its exit status, what it printed, and what Python was asked to do."""
        log = self.root / "log"
        log.write_text("")
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
        done = subprocess.run(
            ["make", "setup", "PYTHON=./python"],
            cwd=self.root,
            env={**clean, "LOG": str(log), **environment},
            capture_output=True,
            text=True,
        )
        asked = log.read_text()
        return done.returncode, done.stdout + done.stderr, ("venv --clear" in asked, "pip install" in asked)


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path / "project")


def test_it_is_made_once(project):
    assert project.setup()[::2] == (0, (True, True))
    assert project.setup()[::2] == (0, (False, False))


def test_new_pins_are_installed_into_it(project):
    project.setup()
    os.utime(project.root / ".venv/.complete", (0, 0))
    assert project.setup()[::2] == (0, (False, True))


@pytest.mark.parametrize("damage", ["no python", "interrupted", "moved"])
def test_what_cannot_be_mended_is_made_anew(project, damage, tmp_path):
    project.setup()
    if damage == "no python":
        (project.root / ".venv/bin/python").unlink()
    elif damage == "interrupted":
        os.utime(project.root / ".venv/.complete", (0, 0))
        assert project.setup(BROKEN_NETWORK="1")[0] != 0
    else:
        project.root = project.root.rename(tmp_path / "elsewhere")
    assert project.setup()[::2] == (0, (True, True))
    assert project.setup()[::2] == (0, (False, False))


def test_an_old_python_is_refused_in_one_clear_line(project):
    status, printed, asked = project.setup(OLD="1")
    assert status != 0 and asked == (False, False)
    assert "./python is missing or older than Python 3.11" in printed
    assert not (project.root / ".venv").exists()
