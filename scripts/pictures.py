"""Make the pictures of docs/inspecting.md: the page of a server that has something to do, in headless Chromium.

    python scripts/pictures.py [FOLDER]

It needs the extra `test`, and Chromium as the distribution has it.
"""

import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from playwright.sync_api import sync_playwright

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
FLAGS = ("--port", "0", "--num-gpu-blocks-override", "400", "--max-num-seqs", "8")
STORY = "Once upon a time there was a brave bear who lived in a warm cave with all of its friends. One day "
NUM_REQUESTS, NUM_TOKENS = 10, 1500
DEADLINE_S = 300
SHOWN_MS = 3000
"""How long the page watches before its picture is taken."""


def main() -> int:
    folder = Path(sys.argv[1]) if sys.argv[1:] else FOLDER
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        print("no Chromium is installed", file=sys.stderr)
        return 2
    with serving() as url, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 760})
        page.goto(url)
        page.click("text=Live")
        for number in range(NUM_REQUESTS):
            threading.Thread(target=ask, args=(url, number), daemon=True).start()
        page.wait_for_timeout(SHOWN_MS)
        page.screenshot(path=folder / "live.png")
        browser.close()
    return 0


def ask(url: str, number: int) -> None:
    body = {"prompt": STORY * 2, "max_tokens": NUM_TOKENS, "ignore_eos": True, "request_id": f"story-{number}"}
    httpx.post(f"{url}/v1/completions", json=body, timeout=DEADLINE_S)


@contextmanager
def serving() -> Iterator[str]:
    """The demo model's server, by its address."""
    command = [sys.executable, "-m", "vllm_lite", "serve", *FLAGS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            for line in process.stdout or ():
                if found := re.search(r"ready at (\S+),", line):
                    yield found.group(1)
                    return
        finally:
            process.terminate()


if __name__ == "__main__":
    sys.exit(main())
