"""A page as a real browser shows it: Chromium, without a window."""

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
"""Its path, or None."""
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr")


def in_browser(text: str, width: int, expression: str, folder: Path) -> tuple[Any, list[str]]:
    """Show a page in a frame of a width in pixels.

    Returns:
        Value of a JavaScript expression about the frame's document, `page`; and messages of the console, which has
        every error of the page and everything that its content policy refused.
    """
    script = f"onload = () => {{ const page = frames[0].document; document.title = JSON.stringify({expression}); }}"
    frame = f'<iframe style="border: 0" width="{width}" height="900" srcdoc="{escape(text)}"></iframe>'
    outer = folder / "outer.html"
    outer.write_text(f"<title></title>{frame}<script>{script}</script>", encoding="utf-8")
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={folder / 'profile'}", "--dump-dom", outer.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.S)
    assert title, done.stderr
    return json.loads(unescape(title[1])), [line for line in done.stderr.splitlines() if "CONSOLE" in line]
