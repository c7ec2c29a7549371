"""The command line: results on standard output, mistakes in one line on standard error."""

import json

import pytest

from benign_attention import chapters, cli, paths
from benign_attention.experiments import CHAPTERS
from benign_attention.realdata.catalogue import SourceError


def call(capsys, *arguments):
    """Exit status, standard output and standard error of `benign-attention arguments`."""
    status = cli.main(list(arguments))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture
def no_kernel(monkeypatch):
    """Fails the test if a kernel would be started."""
    monkeypatch.setattr(chapters, "_execute", lambda *_: pytest.fail("a kernel was started"))


def test_chapters_lists_every_chapter_with_types_defaults_and_help(capsys):
    status, out, _ = call(capsys, "chapters")
    assert status == 0
    assert [line for line in out.splitlines() if not line.startswith(" ")] == list(CHAPTERS)
    assert out.count("\n  n_seeds: int = ") == len(CHAPTERS)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "two_step_gd", "-p", "n_trian", "10"], "n_trian is not a parameter (did you mean n_train?)"),
        (["run", "two_step_dg"], "did you mean two_step_gd?"),
        (["run", "two_step_gd", "-p", "label_noise", "0.7"], "label_noise must be a number in [0, 0.5), got 0.7"),
        (["run", "two_step_gd", "-p", "n_tokens", "1"], "n_tokens must be a whole number of at least 2, got 1"),
        (["run", "two_step_gd", "-p", "dim", "2"], "dim must be a whole number in [3, 1e+15], got 2"),
        (["run", "two_step_gd", "-p", "signal_norm", ".inf"], "signal_norm must be a number"),
        (["run", "two_step_gd", "-p", "step_size", "[1, 2]"], "step_size must be a number"),
        (["run", "two_step_gd", "-p", "step_size", "{"], "step_size must be a number"),
        (["run", "real_images", "-p", "n_train_grid", "abc"], "n_train_grid must be a non-empty list of whole numbers"),
        (["run", "two_step_gd", "--device", "gpu"], "device must be one of auto, cpu, cuda, mps, got 'gpu'"),
        (["run", "two_step_gd", "--scale", "huge"], "scale must be one of smoke, reader, paper, got 'huge'"),
        (["run", "two_step_gd", "-f", "no/such/file.yml"], "'no/such/file.yml' cannot be read"),
        (["run", "two_step_gd", "--out", "/dev/null"], "--out must be a folder that can be written, got '/dev/null'"),
        (["run", "two_step_gd", "-p", "dim"], "'-p' requires 2 arguments"),
        (["run", "two_step_gd", "-p", "n_train", "2000-13-45"], "n_train must be a whole number"),
        (["run", "two_step_gd", "-p", "seed", "1" * 5000], "seed must be a whole number"),
        (["run", "two_step_gd", "-p", "map_label_noise", "[" * 3000], "map_label_noise must be a non-empty list"),
        (["run", "two_step_gd", "-p", "dim", "10" * 20], "dim must be a whole number in [3, 1e+15]"),
        (["run", "two_step_gd", "-p", "signal_norm", "1e300"], "signal_norm must be a number in [1e-15, 1e+15]"),
        (["run", "two_step_gd", "-p", "N_TRAIN", "10"], "did you mean n_train?"),
        (["run", "two_step_gd", "-p", "record_path", "x" * 300], "record_path must be a file that can be written"),
        (["run", "two_step_gd", "--out", "x" * 300], "--out must be a folder that can be written"),
        (["run", "two_step_gd", "--out", str(paths.BOOK)], "--out must be a folder for results"),
        (["run"], "Missing argument 'CHAPTER'"),
        (["runn"], "No such command 'runn'"),
    ],
)
def test_a_mistake_is_one_line_on_standard_error_before_a_kernel_starts(capsys, no_kernel, arguments, says):
    status, out, error = call(capsys, *arguments)
    assert (status, out, error.count("\n")) == (2, "", 1)
    assert says in error and "Traceback" not in error


def test_text_numbers_in_a_parameters_file_are_numbers(capsys, monkeypatch, tmp_path):
    seen = {}
    monkeypatch.setattr(chapters, "run", lambda chapter, params, out: seen.update(params.model_dump()) or 1 / 0)
    file = tmp_path / "my.yml"
    file.write_text("step_size: 1e-3\nn_train: 50\ndim: 70\n")
    with pytest.raises(ZeroDivisionError):
        call(
            capsys,
            "run",
            "two_step_gd",
            "-f",
            str(file),
            "-p",
            "n_train",
            "1e2",
            "--device",
            "auto",
            "--scale",
            "smoke",
        )
    assert (seen["step_size"], seen["n_train"], seen["dim"], seen["device"]) == (1e-3, 100, 70, "auto")


def test_without_a_command_help_is_shown(capsys):
    status, _, error = call(capsys)
    assert status == 2 and "Commands:" in error
    assert call(capsys, "run", "--help")[0] == 0


def test_run_prints_the_metrics_and_leaves_both_files(tiny):
    done = tiny.run("benign-attention", "run", "tiny", "-p", "n_train", "10", "--out", "results")
    assert done.returncode == 0, done.stderr
    assert "product" in done.stdout and "wrote results/tiny.ipynb and results/tiny.json" in done.stdout
    record = json.loads((tiny.root / "results/tiny.json").read_text())
    assert (record["scale"], record["parameters"]["n_train"]) == ("custom", 10)


def test_a_failed_chapter_exits_1_with_one_line(tiny):
    tiny.write("lib/benign_attention/experiments/tiny.py", EXPERIMENT_THAT_FAILS)
    done = tiny.run("benign-attention", "run", "tiny", "--out", "results")
    assert (done.returncode, done.stdout) == (1, "") and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == (
        "Error: tiny failed at In [4] with ValueError: no luck (the traceback is in results/tiny.failed.ipynb)"
    )
    assert not (tiny.root / "results/tiny.json").exists()


EXPERIMENT_THAT_FAILS = '''"""A chapter for tests."""

from benign_attention.parameters import ChapterParams


class Params(ChapterParams):
    n_train: int = 4
    step_size: float = 0.5


def measure(params):
    raise ValueError("no luck")
'''


def test_a_data_set_that_cannot_be_had_is_one_line(capsys, tmp_path, monkeypatch):
    def refuse(*_):
        raise SourceError("cifar10 cannot be had: there is no connection to the hub; mnist5k can be used instead")

    monkeypatch.setattr(chapters, "run", refuse)
    status, out, err = call(capsys, "run", CHAPTERS[0], "--out", str(tmp_path / "out"))
    assert (status, out) == (1, "")
    assert err == "Error: cifar10 cannot be had: there is no connection to the hub; mnist5k can be used instead\n"
