"""The pages in headless Chromium, where it is installed: nothing is missing or fetched, and narrow screens do."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from pipetransformer.report import page as pages
from pipetransformer.report.__main__ import COMPARISON, main
from pipetransformer.report.environment import write_overrides
from pipetransformer.report.figures import OF_A_RUN

from .conftest import Events, write_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TIMEOUT_S, WIDTH = 120, 500
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
    "--disable-background-networking", "--disable-sync", "--disable-extensions", "--enable-logging=stderr",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=5000",
)  # fmt: skip
PROBE = """<script>
addEventListener("load", () => {
  const all = (selector) => [...document.querySelectorAll(selector)];
  document.documentElement.dataset.found = JSON.stringify({
    images: all("img").map((image) => [image.naturalWidth, image.naturalHeight]),
    headings: all("h2").map((heading) => heading.textContent),
    rows: all("section:first-of-type tbody tr").map((row) => row.firstElementChild.textContent),
    fetched: performance.getEntriesByType("resource").map((entry) => entry.name),
    widths: [document.documentElement.scrollWidth, innerWidth],
  });
});
</script>"""
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (apt-get install chromium)")


def opened(page: str, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Opens a page in a browser of its own; gives what its probe found, and the lines of its console."""
    page = page.replace(pages.POLICY, f"{pages.POLICY}; script-src 'unsafe-inline'")
    (folder / "page.html").write_text(page.replace("</head>", f"{PROBE}</head>"))
    profile, url = f"--user-data-dir={folder / 'profile'}", (folder / "page.html").as_uri()
    command = [str(CHROMIUM), *FLAGS, profile, f"--window-size={WIDTH},900", "--dump-dom", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    found = re.search(r'data-found="([^"]*)"', done.stdout)
    assert found is not None, f"the page was not loaded: {done.stderr[-2000:]}"
    return json.loads(unescape(found[1])), [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.fixture
def comparison(events: Events, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(pages, "FIGURES", [each for each in OF_A_RUN if each.name in ("signals", "timeline")])
    for name in ("none", "alpha"):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        write_run(folder, events)
        write_overrides(folder, [f"freeze={name}"])
    main([f"runs={tmp_path / 'runs'}", f"out={tmp_path}"])
    return (tmp_path / COMPARISON).read_text()


def test_a_page_is_whole_in_a_browser_and_fetches_nothing(comparison: str, tmp_path: Path) -> None:
    found, console = opened(comparison, tmp_path)
    assert console == []
    assert found["fetched"] == []
    assert len(found["images"]) == comparison.count("<img") == len(pages.COMPARISONS) + 2 * 2
    assert all(width > 900 and height > 100 for width, height in found["images"])
    assert found["headings"][:3] == ["Runs", "Result over time", "Speed and limit"]
    assert found["rows"] == ["freeze=alpha", "freeze=none"]
    assert found["widths"][0] <= found["widths"][1], "the page as a whole never scrolls sideways"


def test_that_check_notices_a_damaged_image_a_foreign_file_and_too_wide_a_table(tmp_path: Path) -> None:
    image = '<img src="data:image/png;base64,AAAA"><img src="https://example.org/a.png"><img src="other.png">'
    page = f'<html><head><meta http-equiv=Content-Security-Policy content="{pages.POLICY}"></head>{image}'
    found, console = opened(page + f"<p>{'wide' * 500}</p></html>", tmp_path)
    assert sum("Content Security Policy" in line for line in console) == 2
    assert found["images"] == [[0, 0]] * 3
    assert found["widths"][0] > found["widths"][1]
