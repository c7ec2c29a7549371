"""No statement without code and test, no claim without its number; and a map that would notice."""

import shutil
from pathlib import Path

import nbformat
import pytest

from benign_attention import paths, theorem_map
from benign_attention.claims import load_claims
from benign_attention.experiments import CHAPTERS
from benign_attention.records import read_record

THEOREM = "```{prf:theorem} Nothing\n:label: thm-nothing\n\nIt is\n\n$$ 0 = 0 . $$ (eq-nothing)\n```"
THEORY = '''"""Closed forms."""


def nothing():
    """Zero (thm-nothing; Magen et al. 2025,
    eq. 3)."""
    return 0


def _hidden():
    """See thm-nothing."""
'''
TEST = """from benign_attention import theory


def test_nothing():
    assert theory.nothing() == 0
"""


def project(root: Path, text: str = THEOREM, theory: str = THEORY, test: str = TEST, code: str = "") -> Path:
    """A project of one chapter `tiny`, one module `theory` and one test file."""
    cells = [nbformat.v4.new_markdown_cell(text), nbformat.v4.new_code_cell(code)]
    files = {
        "book/tiny.ipynb": nbformat.writes(nbformat.v4.new_notebook(cells=cells)),
        "lib/benign_attention/theory.py": theory,
        "lib/benign_attention/experiments/tiny.py": "from benign_attention.theory import nothing\n\n"
        "ROUNDS = 3\n\n\ndef measure():\n    return [nothing()] * ROUNDS\n\n\ndef explore():\n    return {}\n",
        "tests/test_theory.py": test,
    }
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content, encoding="utf-8")
    return root


def test_every_labelled_statement_has_code_and_a_test_and_every_label_named_is_there():
    assert theorem_map.problems() == []


def test_the_map_covers_every_labelled_statement_of_the_book():
    labels = {row.statement.label for row in theorem_map.statement_rows()}
    text = "".join(path.read_text(encoding="utf-8") for path in paths.BOOK.glob("*.ipynb"))
    assert len(labels) >= text.count(":label:") > 20


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_every_claim_rests_on_a_number_of_its_chapters_committed_record(chapter):
    """A claim that cannot be run at reader scale says so, and names the command that runs it."""
    metrics = read_record(paths.RECORDS / "reader" / f"{chapter}.json").metrics
    for claim in load_claims(chapter):
        if claim.expected.get("reader") == "not run":
            assert claim.command, claim.id
        else:
            missing = [c.metric for c in (claim, *claim.also) if c.metric not in metrics]
            assert missing == [], f"{claim.id} rests on {missing}, not in {chapter}.json"


def test_every_claim_names_a_chapter():
    assert [claim.id for claim in load_claims() if claim.chapter not in CHAPTERS] == []


def test_a_statement_with_code_and_test_is_no_problem(tmp_path):
    root = project(tmp_path)
    assert theorem_map.problems(root) == []
    (row,) = theorem_map.statement_rows(root)
    assert row.statement == theorem_map.Statement("thm-nothing", "Nothing", "theorem", "tiny", ("eq-nothing",))
    assert (row.functions, row.tests) == (("theory.nothing",), ("tests/test_theory.py::test_nothing",))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"text": THEOREM + "\n\n" + THEOREM.replace("thm-nothing", "cor-same")}, "tiny: cor-same is named in no publ"),
        ({"theory": THEORY.replace("Zero (thm-nothing;", "Zero (")}, "tiny: thm-nothing is named in no publ"),
        ({"test": TEST.replace("nothing() ==", "something() ==")}, "tiny: thm-nothing is computed by theory.nothing, "),
        ({"test": TEST.replace("def test_", "def check_")}, "tiny: thm-nothing is computed by theory.nothing, which n"),
        ({"theory": THEORY.replace("Closed forms", "See prop-none")}, "theory names prop-none, which no chapter has"),
        ({"text": THEOREM + "\n\n" + THEOREM}, "eq-nothing is the label of two statements"),
    ],
)
def test_what_is_missing_is_found(tmp_path, change, problem):
    found = theorem_map.problems(project(tmp_path, **change))
    assert any(line.startswith(problem) for line in found), found


def test_an_orphan_in_a_real_chapter_is_found(tmp_path):
    (tmp_path / "book").mkdir()
    for path in paths.BOOK.glob("*.ipynb"):
        shutil.copy(path, tmp_path / "book")
    for name in ("lib", "tests"):
        (tmp_path / name).symlink_to(paths.ROOT / name)
    path = tmp_path / "book/two_step_gd.ipynb"
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(nbformat.v4.new_markdown_cell(":::{prf:lemma} New\n:label: lem-new\n\nIt holds.\n:::"))
    nbformat.write(notebook, path)
    before = theorem_map.problems()
    assert theorem_map.problems(tmp_path) == [*before, "two_step_gd: lem-new is named in no public docstring"]


@pytest.mark.parametrize(
    "test",
    [
        "from benign_attention.theory import nothing as f\n\n\ndef test_it():\n    assert f() == 0\n",
        "import pytest\nfrom benign_attention import theory\n\n\n@pytest.fixture\ndef zero():\n    return "
        "theory.nothing()\n\n\ndef test_it(zero):\n    assert zero == 0\n",
        "from benign_attention import theory\n\nZERO = theory.nothing()\n\n\ndef helper():\n    return ZERO\n\n\n"
        "def test_it():\n    assert helper() == 0\n",
    ],
    ids=["renamed import", "fixture", "helper"],
)
def test_a_test_may_use_code_through_names_of_its_own_file(tmp_path, test):
    (row,) = theorem_map.statement_rows(project(tmp_path, test=test))
    assert row.tests == ("tests/test_theory.py::test_it",)


def test_tests_of_the_modules_own_file_come_first(tmp_path):
    root = project(tmp_path)
    shutil.copy(root / "tests/test_theory.py", root / "tests/test_another.py")
    (row,) = theorem_map.statement_rows(root)
    assert row.tests == ("tests/test_theory.py::test_nothing", "tests/test_another.py::test_nothing")


@pytest.mark.parametrize(
    ("code", "chapters"),
    [
        ("from benign_attention.experiments import tiny as chapter\nchapter.measure()", ("tiny",)),
        ("from benign_attention.experiments import tiny as chapter\nchapter.explore()", ()),
    ],
)
def test_a_place_of_a_paper_leads_to_code_tests_and_the_chapters_that_reach_it(tmp_path, code, chapters):
    (row,) = theorem_map.place_rows(project(tmp_path, code=code))
    assert row.place == "Magen et al. 2025, equation 3"
    assert (row.functions, row.chapters) == (("theory.nothing",), chapters)
    assert row.tests == ("tests/test_theory.py::test_nothing",)


def test_an_equation_has_a_row_once_a_docstring_names_it(tmp_path):
    root = project(tmp_path, theory=THEORY.replace("Zero (thm-nothing", "Zero (thm-nothing, eq-nothing"))
    assert [row.statement.label for row in theorem_map.statement_rows(root)] == ["thm-nothing", "eq-nothing"]


def test_markdown_has_a_definition_for_each_row(tmp_path):
    lines = theorem_map.markdown_lines(project(tmp_path))
    place = lines.index("{prf:ref}`thm-nothing` in {doc}`tiny`")
    assert lines[place + 1 : place + 3] == [
        ": computed by `theory.nothing`",
        ": held by `test_theory.py::test_nothing`",
    ]
    assert sum(line.startswith(": computed by") for line in lines) == 2
