"""What killed processes leave behind is removed, what others are working on is not."""

import os
import time

import pytest

from benign_attention import chapters, leftovers
from benign_attention.realdata import cache


def left_behind(folder, name: str, age: float):
    left = folder / name
    left.mkdir(parents=True)
    (left / "half").write_text("half")
    for path in (left / "half", left):
        os.utime(path, (time.time() - age,) * 2)
    return left


@pytest.mark.parametrize("age", [0.0, 0.9 * leftovers.DAY])
def test_a_folder_that_may_still_be_written_stays(tmp_path, age):
    left = left_behind(tmp_path, ".running-a", age)
    leftovers.remove(tmp_path, ".running-")
    assert (left / "half").exists()


def test_an_old_folder_with_a_fresh_file_stays(tmp_path):
    left = left_behind(tmp_path, ".running-a", 2 * leftovers.DAY)
    os.utime(left / "half")
    os.utime(left, (0, 0))
    leftovers.remove(tmp_path, ".running-")
    assert left.exists()


def test_other_names_stay(tmp_path):
    other = left_behind(tmp_path, "results", 2 * leftovers.DAY)
    leftovers.remove(tmp_path, ".running-")
    assert other.exists()


def test_the_cache_and_the_results_folder_are_cleared_of_them(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    half_made = left_behind(tmp_path / "cache" / "features", cache.MAKING + "a", 2 * leftovers.DAY)
    cache.kept("features/entry", lambda folder: (folder / "file").write_text("content"))
    assert not half_made.exists()
    half_run = left_behind(tmp_path / "out", chapters.RUNNING + "a", 2 * leftovers.DAY)
    with chapters._work_folder(tmp_path / "out", ()):
        assert not half_run.exists()
