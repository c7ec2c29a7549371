"""Pins, continuous execution, Binder, and the anatomy of the chapters' notebooks."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import nbformat
import pytest
import yaml
from papermill import inspect_notebook

from benign_attention import chapters, paths
from benign_attention.claims import load_claims
from benign_attention.experiments import CHAPTERS, load
from benign_attention.records import SCALE_NAMES, scale_of, scale_values
from benign_attention.rendered import documents

WORKFLOWS = sorted((paths.ROOT / ".github/workflows").glob("*.yml"))


def tool(name: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [str(Path(sys.executable).parent / name), *arguments]
    return subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True)


def pins() -> dict[str, str]:
    lines = (paths.ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    return dict(line.split("==") for line in lines)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# Pins


def test_every_pin_is_exact_and_fits_every_platform():
    for name, pinned in pins().items():
        assert re.fullmatch(r"[A-Za-z0-9._-]+", name) and re.fullmatch(r"[0-9][0-9a-z.]*", pinned), (name, pinned)


def test_environment_mirrors_the_pins_and_installs_the_library():
    environment = yaml.safe_load((paths.ROOT / "environment.yml").read_text(encoding="utf-8"))
    (pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    first, *mirrored, last = pip
    assert first.startswith("--extra-index-url") and first.endswith("/cpu")
    assert last == "-e ."
    assert dict(line.split("==") for line in mirrored) == pins()
    assert not (paths.ROOT / "binder").exists(), "a binder/ folder would override environment.yml"


def test_every_direct_dependency_is_pinned_and_installed_as_pinned():
    project = tomllib.loads((paths.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [requirement for group in project["optional-dependencies"].values() for requirement in group]
    pinned = {normal(name): pin for name, pin in pins().items()}
    for requirement in [*project["dependencies"], *extras]:
        name = re.match(r"[A-Za-z0-9._-]+", requirement)[0]
        assert version(name).split("+")[0] == pinned[normal(name)]


def test_installed_packages_are_the_pinned_ones():
    for name, pinned in pins().items():
        try:
            assert version(name).split("+")[0] == pinned, name
        except PackageNotFoundError:  # a dependency on another platform only
            continue


def test_jupyter_book_is_the_line_that_reads_config_yml():
    assert pins()["jupyter-book"].startswith("1.")


# Continuous execution and Binder


def test_workflows_follow_their_schema():
    checked = tool("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *map(str, WORKFLOWS))
    assert len(WORKFLOWS) == 2 and checked.returncode == 0, checked.stdout


def test_workflows_have_no_known_weakness():
    checked = tool("zizmor", "--offline", "--no-progress", *map(str, WORKFLOWS))
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_only_call_make_targets_that_exist(workflow):
    makefile = (paths.ROOT / "Makefile").read_text(encoding="utf-8")
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.M)[1].split()
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"].values()
    commands = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    assert commands
    for command in commands:
        assert re.fullmatch(r"make ([a-z-]+)( [^;&|\n]*)?", command) and command.split()[1] in phony


def test_a_forks_pull_request_never_reaches_the_gpu_runner():
    text = (paths.ROOT / ".github/workflows/gpu.yml").read_text(encoding="utf-8")
    assert "pull_request_target" not in text
    assert "github.event.pull_request.head.repo.full_name == github.repository" in text


@pytest.mark.parametrize("target", ["setup", "book", "test", "lint", "bench", "serve", "ci-gpu"])
def test_make_targets_are_never_taken_for_folders(target):
    asked = subprocess.run(
        ["make", "-n", "-o", ".venv/.complete", target], cwd=paths.ROOT, capture_output=True, text=True
    )
    assert asked.returncode == 0, asked.stderr
    assert "is up to date" not in asked.stdout


def test_binder_has_the_library_before_it_makes_the_environment(tmp_path):
    """repo2docker can build the environment before it copies the repository (its issue 1265); `-e .` then fails."""
    for name in ("environment.yml", "pyproject.toml"):
        shutil.copy(paths.ROOT / name, tmp_path / name)
    planned = tool(
        "jupyter-repo2docker", "--no-build", "--debug", "--user-id", "1000", "--user-name", "joan", str(tmp_path)
    )
    assert planned.returncode == 0, planned.stderr
    steps = planned.stdout + planned.stderr
    copy = steps.index("COPY --chown=1000:1000 src/ ${REPO_DIR}/")
    assert copy < steps.index('env update -p ${NB_PYTHON_PREFIX} --file "environment.yml"')


def test_ci_makes_the_readmes_test_command_run_everything_without_skips():
    readme = (paths.ROOT / "README.md").read_text(encoding="utf-8")
    run = (paths.ROOT / ".ci/run").read_text(encoding="utf-8")
    assert "make test" in readme and "make book" in readme
    assert "make test ALL=1 PYTEST_ARGS=--no-skips" in run
    assert re.search(r"make book SCALE=smoke BOOK_ARGS=\"--all -W", run)


# Chapters


def git_files() -> set[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=paths.ROOT, capture_output=True, text=True, check=True)
    return set(listed.stdout.split("\0"))


def test_the_table_of_contents_lists_the_chapters_that_can_be_run():
    root, *files = documents()
    assert root == "book/index"
    assert sorted(Path(file).name for file in files if (paths.ROOT / f"{file}.ipynb").exists()) == sorted(CHAPTERS)


def test_what_the_book_is_made_of_is_in_git():
    pages = {f"book/{chapter}.ipynb" for chapter in CHAPTERS}
    scales = {f"book/scales/{scale}/{chapter}.yml" for scale in ("smoke", "paper") for chapter in CHAPTERS}
    assert pages | scales | {"book/index.md", "book/references.bib", "book/claims.yml"} <= git_files()


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_notebooks_have_no_outputs_and_the_common_kernel(chapter):
    notebook = nbformat.read(chapters.notebook_path(chapter), as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in notebook.cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None
    stripped = tool("nbstripout", "--verify", "--keep-id", str(chapters.notebook_path(chapter)))
    assert stripped.returncode == 0, stripped.stdout


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_parameters_cell_is_params(chapter):
    """Same names, order and defaults; every line annotated and explained."""
    params_class = load(chapter).Params
    fields = params_class.model_fields
    cell = inspect_notebook(chapters.notebook_path(chapter))
    assert list(cell) == chapters.parameter_names(params_class)
    for name, found in cell.items():
        assert ast.literal_eval(found["default"]) == getattr(params_class(), name), name
        assert found["help"], f"{name} has no comment"
        assert fields[name].description, f"{name} has no description"
        annotation = fields[name].annotation
        expected = annotation.__name__ if annotation in (int, float, bool, str) else ("list", "str")
        assert found["inferred_type_name"].startswith(expected), name


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_parameters_cell_is_the_only_one_with_its_tag_and_the_next_builds_params(chapter):
    notebook = nbformat.read(chapters.notebook_path(chapter), as_version=4)
    tagged = [i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1
    after = next(cell for cell in notebook.cells[tagged[0] + 1 :] if cell.cell_type == "code")
    calls = [node for node in ast.walk(ast.parse(after.source)) if isinstance(node, ast.Call)]
    (built,) = [call for call in calls if getattr(call.func, "attr", getattr(call.func, "id", "")) == "Params"]
    assert {k.arg: ast.unparse(k.value) for k in built.keywords} == {n: n for n in load(chapter).Params.model_fields}


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_scale_files_are_valid_as_they_are_and_name_themselves(chapter):
    params_class = load(chapter).Params
    for scale in SCALE_NAMES:
        values = scale_values(chapter, scale)
        assert scale == "reader" or values, f"{scale} changes nothing"
        assert scale_of(chapter, params_class(**values)) == scale


def test_claims_are_unique_and_belong_to_chapters_and_scales():
    claims = load_claims()
    assert len({claim.id for claim in claims}) == len(claims)
    for claim in claims:
        assert claim.chapter in CHAPTERS and claim.why
        assert set(claim.expected) <= {"reader", "paper"}, "the smoke scale is never compared"
        for control in claim.controls:
            load(claim.chapter).Params().replace(**control.change)
