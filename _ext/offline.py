"""Removes sphinx-thebe, which Jupyter Book always loads: it points to a server elsewhere, and no page uses it."""

from sphinx.application import Sphinx


def drop_thebe(app: Sphinx, pagename: str, templatename: str, context: dict, doctree) -> None:
    for kind in ("script_files", "css_files"):
        context[kind] = [asset for asset in context[kind] if not _is_thebe(asset)]


def _is_thebe(asset) -> bool:
    return "thebe" in f"{asset.filename} {asset.attributes.get('body', '')}".lower()


def setup(app: Sphinx) -> dict:
    app.connect("html-page-context", drop_thebe, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
