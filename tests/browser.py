"""A real headless Chromium that tells of every error and every request of a page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome") or ""
MISSING = "no Chromium here (Debian: apt-get install chromium)"


@dataclass
class Opened:
    """A page that was opened. ``errors``: of its console and scripts; ``requests``: addresses beside its own."""

    page: Page
    errors: list[str] = field(default_factory=list[str])
    requests: list[str] = field(default_factory=list[str])


@contextmanager
def opened(address: str | Path, *, width: int = 1280, dark: bool = False) -> Iterator[Opened]:
    """Open a file or a URL; on leaving, nothing may have gone wrong and nothing may have been asked for."""
    url = address.resolve().as_uri() if isinstance(address, Path) else address
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light")
            found = Opened(page)
            bad = ("error", "warning")
            page.on("console", lambda said: found.errors.append(said.text) if said.type in bad else None)
            page.on("pageerror", lambda error: found.errors.append(str(error)))
            page.on("request", lambda asked: found.requests.append(asked.url) if asked.url != url else None)
            page.goto(url)
            yield found
            assert not found.errors, found.errors
            if isinstance(address, Path):
                assert not found.requests, found.requests
            overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert overflow <= 0, "the page itself does not scroll sideways"
        finally:
            browser.close()
