"""Strict parameters over papermill, and runs that leave everything or nothing."""

import importlib.util
import json

import nbformat
import pytest
from tiny_book import chapter_notebook

from benign_attention import chapters, paths
from benign_attention.parameters import ParameterError
from benign_attention.realdata.catalogue import SourceError
from benign_attention.records import read_record


@pytest.fixture
def book(tiny, monkeypatch):
    """The tiny book as the current one, here and in the kernels started here."""
    spec = importlib.util.spec_from_file_location(
        "tiny_experiment", tiny.root / "lib/benign_attention/experiments/tiny.py"
    )
    experiment = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(experiment)
    monkeypatch.setattr(chapters, "CHAPTERS", ("tiny",))
    monkeypatch.setattr(chapters, "load", lambda chapter: experiment)
    for name, path in {"ROOT": ".", "BOOK": "book", "SCALES": "book/scales", "CLAIMS": "book/claims.yml"}.items():
        monkeypatch.setattr(paths, name, tiny.root / path)
    monkeypatch.setenv("PYTHONPATH", str(tiny.root / "lib"))
    return tiny


@pytest.fixture
def no_kernel(monkeypatch):
    """Fails the test if a kernel would be started."""
    monkeypatch.setattr(chapters, "_execute", lambda *_: pytest.fail("a kernel was started"))


def edit_cell(book, index, source):
    notebook = chapter_notebook()
    notebook.cells[index].source = source
    book.write_notebook(notebook)


def result_files(folder):
    return sorted(file.name for file in folder.iterdir())


def test_chapters_are_described_in_the_order_of_their_parameters_cell(book):
    described = chapters.describe("tiny")
    assert [p.name for p in described] == chapters.parameter_names(chapters.load("tiny").Params)
    assert (described[0].type, described[0].default, described[0].help) == ("int", "4", "training samples")


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        ("1e-3", float, 1e-3),
        (1, float, 1.0),
        ("1e4", int, 10_000),
        (1e4, int, 10_000),
        (2.5, int, 2.5),
        ("many", int, "many"),
        (True, int, True),
        (True, float, True),
        ("1e-3", str, "1e-3"),
        (["1e-3", 1], list[float], [1e-3, 1.0]),
        ("[1, 2]", list[int], "[1, 2]"),
    ],
)
def test_numbers_are_coerced_to_the_annotated_type_and_nothing_else_is(value, annotation, expected):
    found = chapters.coerce(value, annotation)
    assert (found, type(found)) == (expected, type(expected))


def test_a_number_written_as_text_in_a_file_arrives_as_a_number(book, tmp_path):
    file = tmp_path / "my.yml"
    file.write_text("step_size: 1e-3\n")
    assert chapters.parameters("tiny", "reader", chapters.read_parameters(file)).step_size == 1e-3


def test_later_layers_win(book):
    assert chapters.parameters("tiny").n_train == 4
    assert chapters.parameters("tiny", "smoke").n_train == 2
    params = chapters.parameters("tiny", "smoke", {"n_train": 7, "step_size": 1}, {"step_size": 2})
    assert (params.n_train, params.step_size, params.n_seeds) == (7, 2.0, 2)


def test_text_parameters_keep_text_that_yaml_would_read_otherwise(book):
    params_class = chapters.load("tiny").Params
    assert chapters.parse(params_class, "record_path", "1e3") == "1e3"
    assert chapters.parse(params_class, "device", "off") == "off"
    assert chapters.parse(params_class, "n_train", "1_000") == 1000


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ("tiny", "reader", {"n_trian": 10}),
            r"n_trian is not a parameter \(did you mean n_train\?\); the parameters are",
        ),
        (("tiny", "reader", {1: 10}), "1 is not a parameter; the parameters are n_train"),
        (("tiny", "reader", {"zzz": 10}), "zzz is not a parameter; the parameters are n_train, step_size, n_seeds"),
        (("tiny", "reader", {"n_train": "many"}), r"n_train must be a whole number in \[2, 1e\+09\], got 'many'"),
        (("tiny", "reader", {"step_size": float("nan")}), "step_size must be a number greater than 0, got nan"),
        (("tiny", "huge"), "scale must be one of smoke, reader, paper, got 'huge'"),
        (("tinny", "reader"), r"chapter must be one of tiny, got 'tinny' \(did you mean tiny\?\)"),
    ],
)
def test_bad_parameters_are_refused_in_one_line(book, arguments, line):
    with pytest.raises(ParameterError, match=f"^{line}[^\n]*$"):
        chapters.parameters(*arguments)


@pytest.mark.parametrize("text", ["- 1\n- 2\n", "3", "a: [1\n", "\t: x"])
def test_a_parameters_file_that_is_no_mapping_is_refused_in_one_line(tmp_path, text):
    file = tmp_path / "my.yml"
    file.write_text(text)
    with pytest.raises(ParameterError, match=r"^parameters file '[^\n]*$"):
        chapters.read_parameters(file)
    with pytest.raises(ParameterError, match=r"^parameters file '[^\n]* cannot be read \(No such file"):
        chapters.read_parameters(tmp_path / "missing.yml")


def test_an_unwritable_output_is_refused_before_a_kernel_starts(book, tmp_path, no_kernel):
    (tmp_path / "file").write_text("")
    (tmp_path / "out" / "tiny.json").mkdir(parents=True)
    for out in (tmp_path / "file", tmp_path / "file" / "deeper", tmp_path / "out"):
        with pytest.raises(ParameterError, match=r"^--out must be a folder [^\n]*$"):
            chapters.run("tiny", chapters.parameters("tiny"), out)
    params = chapters.parameters("tiny", "reader", {"record_path": str(tmp_path / "file" / "r.json")})
    with pytest.raises(ParameterError, match=r"^record_path must be a file that can be written[^\n]*$"):
        chapters.run("tiny", params, tmp_path / "new")


def test_a_run_leaves_notebook_and_record_and_repeats_itself_in_another_process(book, tmp_path):
    params = chapters.parameters("tiny", "smoke", {"record_path": str(tmp_path / "copy.json")})
    path = chapters.run("tiny", params, tmp_path / "out")
    assert result_files(tmp_path / "out") == ["tiny.ipynb", "tiny.json"]
    record = read_record(path)
    assert (record.chapter, record.scale, record.metrics["product"].per_seed) == ("tiny", "smoke", [6.0, 6.1])
    assert json.loads((tmp_path / "copy.json").read_text()) == json.loads(path.read_text())
    executed = nbformat.read(tmp_path / "out" / "tiny.ipynb", as_version=4)
    assert ".running-" not in nbformat.writes(executed)

    again = book.run("benign-attention", "run", "tiny", "--scale", "smoke", "--out", str(tmp_path / "again"))
    assert again.returncode == 0, again.stderr
    other = read_record(tmp_path / "again" / "tiny.json")
    assert (other.metrics, other.parameters) == (record.metrics, record.parameters)


def test_a_failed_run_says_where_to_look_and_leaves_earlier_results(book, tmp_path):
    out = tmp_path / "out"
    chapters.run("tiny", chapters.parameters("tiny"), out)
    before = (out / "tiny.json").read_text()
    edit_cell(book, 4, "1 / 0")
    with pytest.raises(
        chapters.ChapterError, match=r"^tiny failed at In \[4\] with ZeroDivisionError: [^\n]*failed.ipynb"
    ):
        chapters.run("tiny", chapters.parameters("tiny", "smoke"), out)
    assert result_files(out) == ["tiny.failed.ipynb", "tiny.ipynb", "tiny.json"]
    assert (out / "tiny.json").read_text() == before
    assert "ZeroDivisionError" in (out / "tiny.failed.ipynb").read_text()


def test_a_parameter_refused_by_a_cell_is_one_line_and_leaves_nothing(book, tmp_path):
    refusal = "from benign_attention.parameters import ParameterError\nraise ParameterError('dim must be odd, got 4')"
    edit_cell(book, 4, refusal)
    with pytest.raises(ParameterError, match=r"^dim must be odd, got 4$"):
        chapters.run("tiny", chapters.parameters("tiny"), tmp_path / "out")
    assert result_files(tmp_path / "out") == []


def test_a_data_set_that_cannot_be_had_is_one_line_and_leaves_nothing(book, tmp_path):
    refusal = "from benign_attention.realdata.sources import SourceError\nraise SourceError('trec cannot be had: why')"
    edit_cell(book, 4, refusal)
    with pytest.raises(SourceError, match=r"^trec cannot be had: why$"):
        chapters.run("tiny", chapters.parameters("tiny"), tmp_path / "out")
    assert result_files(tmp_path / "out") == []


def test_a_chapter_without_a_record_is_a_failure(book, tmp_path):
    edit_cell(book, 7, "pass")
    with pytest.raises(chapters.ChapterError, match="left no record"):
        chapters.run("tiny", chapters.parameters("tiny"), tmp_path / "out")
    assert result_files(tmp_path / "out") == []


def test_a_kernel_that_dies_while_starting_is_tried_again_and_a_late_death_is_not(book, tmp_path, monkeypatch):
    starts = []

    def die(*arguments, **options):
        starts.append(1)
        raise RuntimeError("Kernel died before replying to kernel_info")

    monkeypatch.setattr("papermill.execute_notebook", die)
    with pytest.raises(chapters.ChapterError, match=r"^the kernel of tiny\.ipynb died: Kernel died before replying"):
        chapters.run("tiny", chapters.parameters("tiny"), tmp_path / "out")
    assert len(starts) == chapters.ATTEMPTS
    starts.clear()
    monkeypatch.setattr(chapters, "STARTING_SECONDS", -1.0)
    with pytest.raises(chapters.ChapterError):
        chapters.run("tiny", chapters.parameters("tiny"), tmp_path / "out")
    assert len(starts) == 1
    assert result_files(tmp_path / "out") == []


def test_prepared_sources_carry_the_scale_and_are_left_alone_when_nothing_changed(book, tmp_path):
    folder = tmp_path / "src"
    chapters.prepare("smoke", folder)
    notebook = nbformat.read(folder / "book/tiny.ipynb", as_version=4)
    injected = [cell for cell in notebook.cells if "injected-parameters" in cell.metadata.get("tags", [])]
    assert len(injected) == 1 and "n_train = 2" in injected[0].source
    assert not any(cell.get("outputs") for cell in notebook.cells)
    assert "book_scale: smoke" in (folder / "_config.yml").read_text()

    (folder / "book" / "gone.ipynb").write_text("left over from an earlier book")
    (folder / "_build").mkdir()
    (folder / "_build" / "kept").write_text("a build")
    times = {file: file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file()}
    chapters.prepare("smoke", folder)
    after = {file: file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file()}
    assert after == {file: time for file, time in times.items() if file.name != "gone.ipynb"}
