"""A book of one small chapter, with the project's own configuration, extensions and library."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import nbformat
import yaml

from benign_attention import paths

EXPERIMENT = '''"""A chapter for tests."""

from pydantic import Field

from benign_attention.parameters import ChapterParams, SamplesCount
from benign_attention.records import seed_metric

FACTOR = 3


class Params(ChapterParams):
    n_train: SamplesCount = Field(4, description="training samples")
    step_size: float = Field(0.5, gt=0, description="step size")


def measure(params):
    return {"product": seed_metric([FACTOR * params.n_train + 0.1 * run for run in range(params.n_seeds)])}
'''

PARAMETERS = """n_train: int = 4  # training samples
step_size: float = 0.5  # step size
n_seeds: int = 5  # independent runs behind every interval
seed: int = 0  # root of all randomness
device: str = "cpu"  # where arrays live
record_path: str = ""  # also write the record to this file
sections: str = "all"  # point: only what the point's metrics need"""

SET_UP = """from benign_attention.experiments import tiny
from benign_attention.notebook import VerdictBox, say

params = tiny.Params(n_train=n_train, step_size=step_size, n_seeds=n_seeds, seed=seed, device=device,
                     record_path=record_path, sections=sections)
box = VerdictBox("tiny")"""

MEASURE = """measured = tiny.measure(params)
say(f"The product is **{measured['product'].per_seed[0]:g}**.")"""

FIGURE = """import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(3, 2))
_ = axes.plot([0, 1], [0, 1])"""

CLAIM = {
    "id": "T-1",
    "paper": "magen2025",
    "place": "nowhere",
    "says": "The product is positive.",
    "why": "Both factors are.",
    "chapter": "tiny",
    "figure": "fig-line",
    "metric": "product",
    "supported": {"above": 0},
    "refuted": {"below": 0},
}

TOC = {
    "format": "jb-book",
    "root": "book/index",
    "parts": [{"caption": "Tests", "numbered": True, "chapters": [{"file": "book/tiny"}]}],
}


def chapter_notebook() -> nbformat.NotebookNode:
    """The tiny chapter, in the anatomy of every chapter."""
    code, text = nbformat.v4.new_code_cell, nbformat.v4.new_markdown_cell
    cells = [
        text(
            "# A tiny chapter\n\nIs $3 \\times 4 = 12$?\n\n$$ \\sum_i p_i = 1 $$ (eq-tiny)\n\nSee {cite:t}`magen2025`."
        ),
        code(PARAMETERS, metadata={"tags": ["parameters", "hide-input"]}),
        code(SET_UP, metadata={"tags": ["hide-input"]}),
        text("```{prf:theorem} Nothing\n:label: thm-nothing\n\nFrom {eq}`eq-tiny`, nothing follows.\n```"),
        code(MEASURE, metadata={"tags": ["hide-input"]}),
        code(
            FIGURE, metadata={"tags": ["hide-input"], "mystnb": {"figure": {"caption": "A line.", "name": "fig-line"}}}
        ),
        text("See {numref}`fig-line` and {prf:ref}`thm-nothing`."),
        code("record = box.conclude(params, measured)", metadata={"tags": ["hide-input"]}),
    ]
    for index, cell in enumerate(cells):
        cell.id = f"cell-{index}"
    kernelspec = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernelspec})


@dataclass(frozen=True)
class TinyBook:
    """A project in `root` whose only chapter is `tiny`; `run` executes with its library, not the installed one."""

    root: Path

    @classmethod
    def create(cls, root: Path) -> TinyBook:
        root.mkdir(parents=True, exist_ok=True)
        for name in ("_config.yml", "constraints.txt"):
            shutil.copy(paths.ROOT / name, root / name)
        leave_out = shutil.ignore_patterns("__pycache__", "*.egg-info", ".ipynb_checkpoints")
        for name in ("_ext", "book/_static", "lib"):
            shutil.copytree(paths.ROOT / name, root / name, ignore=leave_out)
        shutil.copy(paths.BOOK / "references.bib", root / "book" / "references.bib")
        book = cls(root)
        experiments = root / "lib/benign_attention/experiments"
        book.write("lib/benign_attention/experiments/tiny.py", EXPERIMENT)
        source = (experiments / "__init__.py").read_text(encoding="utf-8")
        source = re.sub(r"CHAPTERS = \(.*?\)", 'CHAPTERS = ("tiny",)', source, count=1, flags=re.DOTALL)
        (experiments / "__init__.py").write_text(source, encoding="utf-8")
        book.write("_toc.yml", yaml.safe_dump(TOC))
        book.write("book/index.md", "# Tests\n\nA book for tests: $a^2 + b^2 = c^2$.\n\n```{bibliography}\n```\n")
        book.write("book/claims.yml", yaml.safe_dump([CLAIM]))
        book.write("book/scales/smoke/tiny.yml", "n_train: 2\nn_seeds: 2\n")
        book.write("book/scales/paper/tiny.yml", "n_train: 400\n")
        book.write_notebook(chapter_notebook())
        return book

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def write_notebook(self, notebook: nbformat.NotebookNode, name: str = "book/tiny.ipynb") -> None:
        self.write(name, nbformat.writes(notebook))

    def run(self, *command: str, timeout: float = 300) -> subprocess.CompletedProcess:
        """Run a console script of the test environment in the book's root."""
        return subprocess.run(
            [str(Path(sys.executable).parent / command[0]), *command[1:]],
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": str(self.root / "lib"), "PYTHONWARNINGS": "ignore"},
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def build(self, *arguments: str, source: str = ".") -> subprocess.CompletedProcess:
        return self.run("jupyter-book", "build", source, *arguments)

    def page(self, name: str = "book/tiny.html", html: str = "_build/html") -> str:
        return (self.root / html / name).read_text(encoding="utf-8")
