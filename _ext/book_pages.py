"""Directives for pages made from the records of all chapters: `ledger`, `findings`, `status`, `theorem-map`.

The records travel inside the executed notebooks. They are read when every page has been read, so these pages do not
depend on the order in which chapters are executed, and are written again in every build.
"""

from __future__ import annotations

from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

from benign_attention import built_pages, theorem_map

PAGES = {"ledger": built_pages.ledger, "findings": built_pages.findings, "status": built_pages.status}


class Placeholder(nodes.General, nodes.Element):
    """Stands for one of these pages until all chapters have been read."""


class BuiltPage(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        pages = getattr(self.env, "built_pages", None) or {}
        self.env.built_pages = {**pages, self.env.docname: self.name}
        return [Placeholder(page=self.name)]


class TheoremMap(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        self.env.note_reread()
        container = nodes.container(classes=["theorem-map"])
        lines = StringList(theorem_map.markdown_lines(), source=self.env.docname)
        self.state.nested_parse(lines, 0, container, match_titles=1)
        return container.children


def always_write(app: Sphinx, env: BuildEnvironment) -> list[str]:
    return [doc for doc in getattr(env, "built_pages", {}) if doc in env.found_docs]


def fill(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    for placeholder in list(doctree.findall(Placeholder)):
        build = built_pages.Build(
            executed=Path(app.outdir).parent / "jupyter_execute",
            images=Path(app.outdir) / "_images",
            link=lambda label: address(app, docname, label),
        )
        html = PAGES[placeholder["page"]](build)
        placeholder.replace_self(nodes.raw("", html, format="html"))


def address(app: Sphinx, docname: str, label: str) -> str:
    """The relative address of a labelled figure or section, seen from `docname`."""
    found = app.env.get_domain("std").anonlabels.get(label)
    if found is None:
        raise ExtensionError(f"no figure or section is called {label}")
    target, anchor = found[:2]
    return f"{app.builder.get_relative_uri(docname, target)}#{anchor}"


def setup(app: Sphinx) -> dict:
    app.add_node(Placeholder)
    for name in PAGES:
        app.add_directive(name, BuiltPage)
    app.add_directive("theorem-map", TheoremMap)
    app.connect("env-updated", always_write)
    app.connect("doctree-resolved", fill)
    return {"parallel_read_safe": False, "parallel_write_safe": False}
