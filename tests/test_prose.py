"""No result is typed into prose: numbers in markdown are parameters, or on a list of exceptions with a reason.

Formulas on display, theorems, proofs, code, references and headings are not prose.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import nbformat
import pytest
import yaml

from benign_attention import paths
from benign_attention.experiments import CHAPTERS, load
from benign_attention.parameters import ChapterParams

PAGES = ("index", *CHAPTERS)
NOT_PROSE = [
    re.compile(pattern, re.M | re.S)
    for pattern in (
        r"^(?P<fence>`{3,}).*?^(?P=fence)[ ]*$",
        r"^(?P<colons>:{3,})\{(?:prf:|math).*?^(?P=colons)[ ]*$",
        r"\$\$.*?\$\$",
        r"`[^`]*`",
        r"(?<=\])\([^)\n]*\)",
        r"^#+ [^\n]*",
        r"^\([\w-]+\)=",
        r"^[ ]*(?:\*\*)?\d+\.(?:\*\*)?(?=\s)",
        r"\b(?:Theorem|Remark|Section|Figure|[Qq]uestion|[Ss]tep|Python) \d+(?:\.\d+)*",
    )
]
FORMULA = re.compile(r"(?<![\\$])\$(?!\$)(.+?)(?<!\\)\$", re.S)
NUMBER = re.compile(
    r"(?<![\w.^])(?<!\w-)(?:\d+(?:(?:[\u202f\u00a0 ]|\\,)\d{3})*(?:\.\d+)?|\.\d+)(?P<percent>[\s\\,]*%)?"
)


@dataclass(frozen=True)
class Allowed:
    """A stretch of a page's prose, `text`, whose numbers may be typed."""

    page: str
    text: str
    reason: str

    def spans(self, prose: str) -> list[tuple[int, int]]:
        pattern = r"\s+".join(map(re.escape, self.text.split()))
        return [match.span() for match in re.finditer(pattern, prose)]


def typed_numbers(text: str) -> Iterator[tuple[int, str, float | None]]:
    """Place, text and value of every number in the prose of a cell; a percentage has no value, no parameter is one.

    In a formula only decimals and percentages count, and whole numbers that are all of it: the others are counts,
    exponents and sizes.
    """
    for pattern in NOT_PROSE:
        text = pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    formulas = list(FORMULA.finditer(text))
    for match in NUMBER.finditer(text):
        number = match[0].strip()
        inside = [f[1].strip() for f in formulas if f.start() < match.start() < f.end()]
        if inside and not (match["percent"] or "." in number or inside == [number]):
            continue
        yield match.start(), number, None if match["percent"] else float(re.sub(r"[^\d.]", "", number))


def parameter_values(chapter: str) -> set[float]:
    """Numbers that set up a chapter: defaults of its parameters, and constants of its experiments' modules."""
    module = load(chapter)
    fields = [name for name in module.Params.model_fields if name not in ChapterParams.model_fields]
    values = set(numbers(getattr(module.Params(), name) for name in fields))
    parts = [m for m in vars(module).values() if isinstance(m, ModuleType) and ".experiments." in m.__name__]
    for part in (module, *parts):
        for node in ast.parse(Path(part.__file__).read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                values |= set(numbers(n.value for n in ast.walk(node) if isinstance(n, ast.Constant)))
    return values


def numbers(values: Iterable) -> Iterator[float]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from numbers(value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield float(value)


def cells_of(page: str) -> list[str]:
    if page == "index":
        return [(paths.BOOK / "index.md").read_text(encoding="utf-8")]
    notebook = nbformat.read(paths.BOOK / f"{page}.ipynb", as_version=4)
    return [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]


def allowed_on(page: str) -> list[Allowed]:
    entries = yaml.safe_load((paths.ROOT / "tests/allowed_numbers.yml").read_text(encoding="utf-8"))
    return [allowed for entry in entries if (allowed := Allowed(**entry)).page == page]


def unexplained(cells: list[str], parameters: set[float], exceptions: list[Allowed]) -> list[str]:
    """Each typed number that is neither a parameter nor an exception, with the words around it."""
    found = []
    for text in cells:
        spans = [span for exception in exceptions for span in exception.spans(text)]
        for place, number, value in typed_numbers(text):
            if value not in parameters and not any(start <= place < end for start, end in spans):
                around = " ".join(text[max(0, place - 60) : place + 40].split())
                found.append(f"{number} in: … {around} …")
    return found


@pytest.mark.parametrize("page", PAGES)
def test_no_result_is_typed_into_prose(page):
    parameters = set() if page == "index" else parameter_values(page)
    found = unexplained(cells_of(page), parameters, allowed_on(page))
    assert found == [], "compute the sentence, or give a reason in tests/allowed_numbers.yml"


@pytest.mark.parametrize("page", PAGES)
def test_every_exception_is_still_needed_and_has_a_reason(page):
    cells, exceptions = cells_of(page), allowed_on(page)
    parameters = set() if page == "index" else parameter_values(page)
    for exception in exceptions:
        others = [other for other in exceptions if other is not exception]
        assert exception.reason and any(exception.spans(text) for text in cells), exception.text
        assert unexplained(cells, parameters, others), f"{exception.text!r} holds no number that needs it"


def test_exceptions_are_on_pages_that_exist():
    entries = yaml.safe_load((paths.ROOT / "tests/allowed_numbers.yml").read_text(encoding="utf-8"))
    assert {entry["page"] for entry in entries} <= set(PAGES)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Accuracy is 0.93 at the end.", ["0.93"]),
        ("Accuracy is $0.93$, or $a=0.93$.", ["0.93", "0.93"]),
        ("Accuracy is 93 %, that is 93% or $93\\,\\%$.", ["93 %", "93%", "93\\,\\%"]),
        ("It takes 4711 steps, or $4711$; a slope of −.48 and of -0.48.", ["4711", "4711", ".48", "0.48"]),
        ("Of 10 000 samples 12 are lost.", ["10 000", "12"]),
        ("| a | 0.97 |\n|---|---|\n| b | 3 |", ["0.97", "3"]),
        (":::{dropdown} Solution\nMeasured: 17.\n:::", ["17"]),
        ("By {eq}`eq-x2` and Theorem 3.3, after step 2, Q-DM-3 holds.", []),
        ("At $d=n^2$, $T=8$ and $10^{12}$, [see](#part-5) and `n = 7`.", []),
        ("## 3 ways\n\n1. First\n2. Second\n\n(sec-4)=\n**5.** Third", []),
        ("$$ x = 0.5 $$ (eq-half)\n\n```{prf:theorem} Half\n\nIt is 0.5.\n```\n\n```console\n$ 1\n```", []),
    ],
)
def test_typed_numbers_are_found_in_prose_alone(text, found):
    assert [number for _, number, _ in typed_numbers(text)] == found


def test_a_typed_result_in_a_real_chapter_is_found():
    cells = [*cells_of("two_step_gd"), "Fresh data are classified with an accuracy of 0.987."]
    (line,) = unexplained(cells, parameter_values("two_step_gd"), allowed_on("two_step_gd"))
    assert line.startswith("0.987 in: … Fresh data")


def test_parameters_and_excepted_sentences_pass():
    cells = ["We take a label noise of 0.2 and find\n0.4 as published; elsewhere 0.4."]
    exception = Allowed("two_step_gd", "find 0.4 as published", "published value")
    (line,) = unexplained(cells, {0.2}, [exception])
    assert line.startswith("0.4 in:") and line.endswith("elsewhere 0.4. …")
