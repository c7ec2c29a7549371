"""What tests of experiments keep on disk."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A cache folder of its own for every test module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BENIGN_ATTENTION_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
