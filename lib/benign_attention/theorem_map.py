"""Which code computes each labelled statement of the book, which tests hold that code, and the same for the papers.

A public docstring claims a statement by naming its label, a name that begins with `thm-`, `prop-` and the like, and a
place of a paper by authors, year, comma and place. Notebooks, docstrings and tests are read as text and syntax trees;
nothing is imported or run.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benign_attention import paths

PACKAGE = "benign_attention"
LABEL = re.compile(r"(?<![\w-])(?:thm|prop|lem|cor|def|rem|eq)-[a-z0-9]+(?:-[a-z0-9]+)*(?![\w-])")
DIRECTIVE = re.compile(
    r"^(?P<fence>`{3,}|:{3,})\{prf:(?P<kind>\w+)\}[ ]*(?P<title>[^\n]*)\n(?P<body>.*?)^(?P=fence)[ ]*$", re.M | re.S
)
EQUATION = re.compile(r"\$\$[ ]*\((eq-[\w-]+)\)")
PLACE = re.compile(
    r"(Magen et al\.|Sakamoto and Sato) \(?2025\)?, "
    r"((?:Theorem|Remark|Section) \d+(?:\.\d+)*(?:, item \d+)?|(?:eq\.|equation) \d+|appendix|official code)"
)
TESTS_SHOWN = 3


@dataclass(frozen=True)
class Statement:
    """A labelled statement or equation of a chapter. equations: labels of the equations inside a statement."""

    label: str
    title: str
    kind: str
    chapter: str
    equations: tuple[str, ...] = ()


@dataclass(frozen=True)
class StatementRow:
    """Where a statement is computed. functions: `module.name` inside the package; tests: `tests/file.py::test`."""

    statement: Statement
    functions: tuple[str, ...]
    tests: tuple[str, ...]


@dataclass(frozen=True)
class PlaceRow:
    """Where a place of a paper is computed. chapters: those whose notebook reaches one of the functions."""

    place: str
    functions: tuple[str, ...]
    tests: tuple[str, ...]
    chapters: tuple[str, ...]


def statements(book: Path) -> list[Statement]:
    """Every labelled statement, and every labelled equation, of the notebooks in `book`, by chapter and place."""
    found = []
    for path in sorted(book.glob("*.ipynb")):
        for source in _cells(path, "markdown"):
            for match in DIRECTIVE.finditer(source):
                label = re.search(r"^:label:[ ]*(\S+)", match["body"], re.M)
                if label:
                    inside = tuple(EQUATION.findall(match["body"]))
                    found.append(Statement(label[1], match["title"].strip(), match["kind"], path.stem, inside))
            found += [Statement(label, "", "equation", path.stem) for label in EQUATION.findall(source)]
    return found


def statement_rows(root: Path = paths.ROOT) -> list[StatementRow]:
    """One row for each labelled statement of the book, and for each labelled equation that some docstring names."""
    named: dict[str, list[str]] = {}
    for name, text in docstrings(_library(root)):
        for label in dict.fromkeys(LABEL.findall(text)):
            named.setdefault(label, []).append(name)
    uses = names_in_tests(root / "tests")
    return [
        StatementRow(statement, functions, _tests_of(functions, uses))
        for statement in statements(root / "book")
        if (functions := tuple(named.get(statement.label, ()))) or statement.kind != "equation"
    ]


def place_rows(root: Path = paths.ROOT) -> list[PlaceRow]:
    """One row for each place of the two papers that a docstring names, by paper and place."""
    named: dict[str, list[str]] = {}
    for name, text in docstrings(_library(root)):
        for paper, place in dict.fromkeys(PLACE.findall(text)):
            named.setdefault(f"{paper} 2025, {place.replace('eq.', 'equation')}", []).append(name)
    uses = names_in_tests(root / "tests")
    chapters = names_in_chapters(root)
    return [
        PlaceRow(place, tuple(dict.fromkeys(functions)), _tests_of(functions, uses), _users(functions, chapters))
        for place, functions in sorted(named.items())
    ]


def problems(root: Path = paths.ROOT) -> list[str]:
    """One line for each statement without code or without a test, for each unknown label and for each used twice."""
    found = []
    for row in statement_rows(root):
        place = f"{row.statement.chapter}: {row.statement.label}"
        if not row.functions:
            found.append(f"{place} is named in no public docstring")
        elif not row.tests:
            found.append(f"{place} is computed by {', '.join(row.functions)}, which no test uses")
    labels = [statement.label for statement in statements(root / "book")]
    found += [f"{label} is the label of two statements" for label in sorted(set(labels)) if labels.count(label) > 1]
    for name, text in docstrings(_library(root)):
        found += [f"{name} names {label}, which no chapter has" for label in LABEL.findall(text) if label not in labels]
    return found


def markdown_lines(root: Path = paths.ROOT) -> list[str]:
    """Both maps as Markdown definition lists, with MyST references to statements and chapters."""
    lines = ["## Statements of this book", ""]
    for row in statement_rows(root):
        role = "eq" if row.statement.kind == "equation" else "prf:ref"
        term = f"{{{role}}}`{row.statement.label}` in {_documents([row.statement.chapter])}"
        lines += _definition(term, row.functions, row.tests)
    lines += ["## Places of the papers", ""]
    for row in place_rows(root):
        term = f"{row.place}, in {_documents(row.chapters)}" if row.chapters else row.place
        lines += _definition(term, row.functions, row.tests)
    return lines


def _definition(term: str, functions: Iterable[str], tests: Iterable[str]) -> list[str]:
    tests = [test.removeprefix("tests/") for test in tests]
    more = f" and {len(tests) - TESTS_SHOWN} more" if len(tests) > TESTS_SHOWN else ""
    held = f"{_code(tests[:TESTS_SHOWN])}{more}" if tests else "the tests of the chapter as a whole"
    return [term, f": computed by {_code(functions)}", f": held by {held}", ""]


def docstrings(library: Path) -> Iterator[tuple[str, str]]:
    """`module.name` and docstring, in one line, of all modules and of their public functions and classes.

    A method's docstring belongs to its class.
    """
    for path in sorted(library.rglob("*.py")):
        module = _module(path, library)
        tree = _parse(path)
        yield module, _one_line(tree)
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                methods = [m for m in getattr(node, "body", ()) if isinstance(m, ast.FunctionDef)]
                parts = [node, *methods] if isinstance(node, ast.ClassDef) else [node]
                yield f"{module}.{node.name}", " ".join(filter(None, map(_one_line, parts)))


def names_in_tests(folder: Path) -> dict[str, set[str]]:
    """What each test uses of the package, as `module.name`: itself, or through fixtures and helpers of its own file."""
    found = {}
    for path in sorted(folder.rglob("test_*.py")):
        file = f"{folder.name}/{path.relative_to(folder).as_posix()}"
        graph = _graph(_parse(path), file)
        tests = [name for name in graph if name.startswith(f"{file}.test_")]
        found |= {name.replace(f"{file}.", f"{file}::"): _reached({name}, graph) for name in tests}
    return found


def names_in_chapters(root: Path) -> dict[str, set[str]]:
    """What each chapter's notebook uses of the package, as `module.name`: itself, or through what it calls."""
    library = _library(root)
    graph: dict[str, set[str]] = {}
    for path in library.rglob("*.py"):
        graph |= _graph(_parse(path), _module(path, library))
    found = {}
    for notebook in sorted((root / "book").glob("*.ipynb")):
        tree = ast.parse("\n".join(_cells(notebook, "code")))
        found[notebook.stem] = _reached(_mentioned(tree, _aliases(tree), "notebook"), graph)
    return found


def _library(root: Path) -> Path:
    return root / "lib" / PACKAGE


def _module(path: Path, library: Path) -> str:
    return ".".join(path.relative_to(library).with_suffix("").parts).removesuffix(".__init__")


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _one_line(node: ast.AST) -> str:
    return " ".join((ast.get_docstring(node) or "").split())


def _cells(path: Path, kind: str) -> list[str]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]


def _aliases(tree: ast.AST) -> dict[str, str]:
    """Local names of what a file imports from the package, as `module` or `module.name`."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            module = node.module.removeprefix(PACKAGE).lstrip(".")
            found |= {n.asname or n.name: f"{module}.{n.name}".lstrip(".") for n in node.names}
    return found


def _graph(tree: ast.Module, here: str) -> dict[str, set[str]]:
    """What each definition of a file mentions: `module.name` of the package, or `here.name` of the file itself."""
    aliases = _aliases(tree)
    graph: dict[str, set[str]] = {}
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names = [node.name]
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
        else:
            continue
        graph |= {f"{here}.{name}": _mentioned(node, aliases, here) for name in names}
    return graph


def _mentioned(node: ast.AST, aliases: dict[str, str], here: str) -> set[str]:
    """Names in a syntax tree; arguments count as names, because pytest's are fixtures."""
    found = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id in aliases:
            found.add(f"{aliases[part.value.id]}.{part.attr}")
        elif isinstance(part, ast.Name):
            found.add(aliases.get(part.id, f"{here}.{part.id}"))
        elif isinstance(part, ast.arg):
            found.add(f"{here}.{part.arg}")
    return found


def _reached(names: set[str], graph: dict[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = set(names)
    while waiting:
        name = waiting.pop()
        reached.add(name)
        waiting |= graph.get(name, set()) - reached
    return reached


def _users(functions: Iterable[str], uses: dict[str, set[str]]) -> tuple[str, ...]:
    """Those who use one of the functions; of a module, anything in it; of a class, anything of it."""
    wanted = tuple(functions)
    return tuple(
        user for user, names in uses.items() if any(n == f or n.startswith(f"{f}.") for n in names for f in wanted)
    )


def _tests_of(functions: Iterable[str], uses: dict[str, set[str]]) -> tuple[str, ...]:
    """Tests that use one of the functions; those in the test file of its module come first."""
    files = {f"/test_{part}.py" for name in functions for part in name.split(".")}
    return tuple(sorted(_users(functions, uses), key=lambda test: not any(file in test for file in files)))


def _documents(chapters: Iterable[str]) -> str:
    return ", ".join(f"{{doc}}`{chapter}`" for chapter in chapters)


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
