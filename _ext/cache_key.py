"""Gives executed notebooks a cache folder named after everything that they were made with."""

from pathlib import Path

from sphinx.application import Sphinx
from sphinx.config import Config

from benign_attention.cache_key import cache_key, prune


def choose_cache(app: Sphinx, config: Config) -> None:
    caches = Path(app.outdir).parent / ".jupyter_cache"
    folder = caches / cache_key(config.book_scale)
    folder.mkdir(parents=True, exist_ok=True)
    prune(caches, keep=folder)
    config.nb_execution_cache_path = str(folder)


def setup(app: Sphinx) -> dict:
    app.add_config_value("book_scale", "reader", "env")
    # Sphinx compares the configuration with that of the last build after this event: a new folder re-reads every page.
    app.connect("config-inited", choose_cache)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
