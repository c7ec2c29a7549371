"""The key changes with everything that executed notebooks depend on, and with nothing else."""

import os

import pytest

from benign_attention.cache_key import N_KEPT, cache_key, code_without_words, prune

TINY = "lib/benign_attention/experiments/tiny.py"


def edit(book, name, old, new):
    text = (book.root / name).read_text(encoding="utf-8")
    assert old in text
    book.write(name, text.replace(old, new))


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        (TINY, "FACTOR = 3", "FACTOR = 4"),
        ("constraints.txt", "numpy==", "numpy==9"),
        ("book/claims.yml", "above: 0", "above: 1"),
        ("book/scales/smoke/tiny.yml", "n_train: 2", "n_train: 3"),
    ],
)
def test_a_change_that_can_change_numbers_changes_the_key(tiny, name, old, new):
    before = cache_key("reader", tiny.root)
    edit(tiny, name, old, new)
    assert cache_key("reader", tiny.root) != before


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        (TINY, '"""A chapter for tests."""', '"""Other words."""  # and a comment'),
        (TINY, "FACTOR = 3", "FACTOR   =   3  # a comment"),
        ("book/claims.yml", "- ", "# a comment\n- "),
        ("book/references.bib", "year", "Year"),
    ],
)
def test_words_and_layout_leave_the_key(tiny, name, old, new):
    before = cache_key("reader", tiny.root)
    edit(tiny, name, old, new)
    assert cache_key("reader", tiny.root) == before


def test_a_new_module_or_data_file_changes_the_key_and_bytecode_does_not(tiny):
    keys = [cache_key("reader", tiny.root)]
    tiny.write("lib/benign_attention/__pycache__/x.pyc", "bytecode")
    assert cache_key("reader", tiny.root) == keys[0]
    for name in ("lib/benign_attention/new.py", "lib/benign_attention/table.csv"):
        tiny.write(name, "x = 1\n")
        keys.append(cache_key("reader", tiny.root))
    assert len(set(keys)) == 3


def test_scales_have_different_keys_that_begin_with_their_names(tiny):
    assert cache_key("smoke", tiny.root).startswith("smoke-")
    assert cache_key("smoke", tiny.root).split("-")[1] != cache_key("reader", tiny.root).split("-")[1]


def test_a_string_that_is_no_docstring_is_code():
    assert code_without_words("x = 'a'") != code_without_words("x = 'b'")
    assert code_without_words("def f():\n    'a'\n    return 1") == code_without_words("def f():\n    return 1  # b")


def test_prune_keeps_the_latest_caches_and_the_one_in_use(tmp_path):
    folders = [tmp_path / f"reader-{i}" for i in range(N_KEPT + 3)]
    for age, folder in enumerate(folders):
        folder.mkdir()
        os.utime(folder, (1e9 - age, 1e9 - age))
    oldest = folders[-1]
    prune(tmp_path, keep=oldest)
    assert set(tmp_path.iterdir()) == {oldest, *folders[: N_KEPT - 1]}
