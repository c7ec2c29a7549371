"""What must hold on every rendered page, in the small book of the tests as in the real one."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote

import yaml
from bs4 import BeautifulSoup

REPOSITORY = "https://github.com/benign-attention/benign-attention"


def pages(html: Path) -> list[Path]:
    """The rendered pages, without those that Sphinx adds for itself."""
    return sorted((html / "book").glob("*.html"))


def soup(page: Path) -> BeautifulSoup:
    return BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser")


def foreign_assets(page: Path) -> list[str]:
    """Scripts, stylesheets, images, fonts and frames that the page would load from elsewhere."""
    found = []
    for tag in soup(page).find_all(["script", "link", "img", "iframe", "source", "video", "audio", "object"]):
        if tag.name == "link" and not set(tag.get("rel", [])) & {"stylesheet", "preload", "icon", "modulepreload"}:
            continue
        address = tag.get("src") or tag.get("href") or tag.get("data") or ""
        if re.match(r"(https?:)?//", address):
            found.append(address)
    return found


def foreign_style_imports(html: Path) -> list[str]:
    """`url(...)` and `@import` in stylesheets that point elsewhere."""
    pattern = re.compile(r"(?:url\(|@import\s+)[\"']?((?:https?:)?//[^\"')]+)")
    return [match for css in html.rglob("*.css") for match in pattern.findall(css.read_text(encoding="utf-8"))]


def launch_links(page: Path) -> dict[str, str]:
    """The repository file that each launch button opens, by provider."""
    found = {}
    for link in soup(page).find_all("a", href=True):
        address = unquote(link["href"])
        if address.startswith("https://mybinder.org/"):
            found["binder"] = address.split("?urlpath=lab/tree/")[1]
        elif address.startswith("https://colab.research.google.com/"):
            found["colab"] = address.split("/blob/main/")[1]
    return found


def seconds_in_cache(build: Path) -> list[float]:
    """Execution time of every cached notebook: at least that of its slowest cell."""
    times = []
    for database in build.glob(".jupyter_cache/*/global.db"):
        with closing(sqlite3.connect(database)) as connection:
            rows = connection.execute("select data from nbcache").fetchall()
        times += [yaml.safe_load(row[0])["execution_seconds"] for row in rows]
    return times


def wait_for_maths(browser, page: Path) -> list[str]:
    """Open the page from `file://`, wait for MathJax, and return the formulas that it left as text or as errors."""
    browser.set_script_timeout(60)
    browser.get(page.resolve().as_uri())
    browser.execute_async_script(
        "const done = arguments[0];"
        "if (!document.querySelector('script[src*=\"mathjax\"]')) { done(); return; }"  # a page without formulas
        "const ready = () => window.MathJax?.startup?.promise;"
        "const wait = () => ready() ? ready().then(() => done()) : setTimeout(wait, 50);"
        "wait();"
    )
    return browser.execute_script(
        "const bad = [...document.querySelectorAll('.math')].filter(e => !e.querySelector('mjx-container svg'));"
        "const errors = [...document.querySelectorAll('[data-mjx-error], mjx-merror')];"
        "return [...bad, ...errors].map(e => e.textContent.slice(0, 80));"
    )


def overflow_on_a_phone(browser, page: Path) -> int:
    """By how many pixels the page is wider than a phone's screen of 375."""
    metrics = {"width": 375, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        wait_for_maths(browser, page)
        return browser.execute_script(
            "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
