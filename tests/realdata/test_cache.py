import pytest

from benign_attention.parameters import ParameterError
from benign_attention.realdata import cache


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))


class Maker:
    """Writes two files and counts how often it was asked."""

    def __init__(self):
        self.calls = 0

    def __call__(self, folder):
        self.calls += 1
        (folder / "a.bin").write_bytes(b"0123456789" * 1000)
        (folder / "b.txt").write_text("b")


def test_the_folder_is_the_one_that_the_user_sets(monkeypatch, tmp_path):
    assert cache.folder() == tmp_path / "cache"
    monkeypatch.delenv(cache.VARIABLE)
    assert cache.folder().name == "benign-attention"


def test_an_entry_is_made_once():
    make = Maker()
    first = cache.kept("some/entry", make)
    assert cache.kept("some/entry", make) == first == cache.folder() / "some" / "entry"
    assert make.calls == 1
    assert (first / "a.bin").stat().st_size == 10_000


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: (entry / "a.bin").write_bytes(b"0123456789" * 999),
        lambda entry: (entry / "a.bin").write_bytes(b"012345678X" + b"0123456789" * 999),
        lambda entry: (entry / "b.txt").unlink(),
        lambda entry: (entry / cache.MANIFEST).unlink(),
        lambda entry: (entry / cache.MANIFEST).write_text('{"a.bin": "12'),
        lambda entry: (entry / cache.MANIFEST).write_text("[]"),
        lambda entry: (entry / cache.MANIFEST).write_text("{}"),
    ],
    ids=["truncated", "altered", "a file less", "no manifest", "half a manifest", "other manifest", "empty manifest"],
)
def test_a_damaged_entry_is_noticed_and_made_again(damage):
    make = Maker()
    entry = cache.kept("entry", make)
    damage(entry)
    with pytest.warns(UserWarning, match="^entry in the cache was altered or truncated: it is made again$"):
        again = cache.kept("entry", make)
    assert make.calls == 2
    assert (again / "a.bin").read_bytes() == b"0123456789" * 1000 and (again / "b.txt").read_text() == "b"
    assert cache.kept("entry", make) == again and make.calls == 2


def test_a_file_where_the_entry_should_be_is_replaced():
    cache.folder().mkdir()
    (cache.folder() / "entry").write_text("not a folder")
    with pytest.warns(UserWarning, match="made again"):
        assert (cache.kept("entry", Maker()) / "b.txt").read_text() == "b"


def test_an_attempt_that_fails_leaves_nothing():
    def fail(folder):
        (folder / "a.bin").write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        cache.kept("entry", fail)
    assert list(cache.folder().iterdir()) == []


def test_another_process_that_was_faster_wins():
    def slow(folder):
        cache.kept("entry", Maker())
        (folder / "a.bin").write_bytes(b"mine")

    assert (cache.kept("entry", slow) / "a.bin").read_bytes() == b"0123456789" * 1000
    assert [path.name for path in cache.folder().iterdir()] == ["entry"]


@pytest.mark.parametrize("broken", ["dangling link", "link", "only a manifest"])
def test_entries_that_are_no_folder_of_files_are_made_again(broken, tmp_path, monkeypatch):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    if broken == "only a manifest":
        (tmp_path / "entry").mkdir()
        (tmp_path / "entry" / cache.MANIFEST).write_text("{}")
    else:
        (tmp_path / "entry").symlink_to(tmp_path / ("elsewhere" if broken == "link" else "nowhere"))
    with pytest.warns(UserWarning, match="made again"):
        entry = cache.kept("entry", lambda folder: (folder / "file").write_text("content"))
    assert (entry / "file").read_text() == "content" and not entry.is_symlink()


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "file"))
    with pytest.raises(ParameterError, match="BENIGN_ATTENTION_CACHE must be a folder that can be written"):
        cache.kept("entry", lambda folder: None)
