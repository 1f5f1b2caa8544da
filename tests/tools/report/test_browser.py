"""The page in a real browser: its script runs, tells the values, and nothing is wider than the window."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lightning_longctx.cli import main
from tests.tools.report.helpers import STEPS, Page, write_run

BROWSER = next(
    (
        found
        for name in (os.environ.get("BROWSER_BINARY", ""), "chromium", "chromium-browser", "google-chrome")
        if name and (found := shutil.which(name))
    ),
    None,
)

#: Runs after the page's own script, and leaves what it saw in the document.
PROBE = """
window.addEventListener("error", (event) => { document.body.dataset.error = event.message; });
document.addEventListener("securitypolicyviolation", (event) => { document.body.dataset.error = event.blockedURI; });
window.addEventListener("load", () => {
  const root = document.documentElement, seen = { wide: root.scrollWidth, window: window.innerWidth };
  const canvas = document.querySelector(".canvas"), box = canvas.getBoundingClientRect();
  const at = (share) => {
    const place = { clientX: box.left + share * box.width, clientY: box.top + 9 };
    canvas.dispatchEvent(new PointerEvent("pointermove", place));
    return canvas.querySelector(".tip").innerText;
  };
  seen.tips = [at(0), at(0.5), at(1)];
  seen.lines = Array.from(document.querySelectorAll("path.line"), (path) => getComputedStyle(path).stroke);
  seen.page = getComputedStyle(document.body).backgroundColor;
  const input = document.querySelector(".slider input");
  input.value = 0;
  input.dispatchEvent(new Event("input"));
  seen.caption = document.querySelector("output").textContent;
  seen.heat = document.querySelector(".heat").style.backgroundPosition;
  document.body.dataset.seen = JSON.stringify(seen);
});
"""


def look(page: Path, width: int, *flags: str) -> dict:
    """Open a copy of a page with the probe in it."""
    assert BROWSER is not None
    probed = page.with_name(f"probed-{width}.html")
    probed.write_text(page.read_text().replace("</body>", f"<script>{PROBE}</script></body>"))
    command = [
        BROWSER,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        f"--window-size={width},800",
    ]
    command += [f"--user-data-dir={page.parent.resolve()}/profile", "--virtual-time-budget=3000", "--dump-dom", *flags]
    done = subprocess.run(
        [*command, probed.resolve().as_uri()], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "data-error" not in done.stdout, re.findall(r'data-error="[^"]*"', done.stdout)
    (body,) = Page(done.stdout).all("body")
    return json.loads(body.attributes["data-seen"])


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [1280, 500])
def test_the_page_works_in_a_browser(width: int) -> None:
    path = write_run(Path("run"))
    assert main(["report", str(path)]) == 0
    seen = look(path / "report.html", width)
    assert seen["wide"] <= seen["window"]
    first, middle, last = seen["tips"]
    assert first.split("\n") == ["step 0", "5 training"]
    assert re.fullmatch(r"step 1[45]\n3\.[56]\d* training", middle)
    assert last.split("\n") == [f"step {STEPS - 1}", "2.1 training", "4.25 validation"]
    assert "none" not in seen["lines"]
    assert len(set(seen["lines"])) >= 2
    assert seen["caption"] == "steps 1 to 15"
    assert seen["heat"].replace("px", "").replace("%", "") == "0 0"


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_a_dark_screen_gets_a_dark_page() -> None:
    path = write_run(Path("run"))
    assert main(["report", str(path)]) == 0
    light, dark = (
        look(path / "report.html", 1280, f"--blink-settings=preferredColorScheme={scheme}") for scheme in (1, 0)
    )
    brightness = [sum(map(int, re.findall(r"\d+", seen["page"])[:3])) for seen in (light, dark)]
    assert brightness[0] > 700
    assert brightness[1] < 100
    assert light["lines"] != dark["lines"]
