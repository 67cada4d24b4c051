"""Make the pictures of docs/inspecting.md: the page of a busy server, in headless Chromium, the page of the trace that
it has written, a figure of this trace, and the page of several models.

    python scripts/pictures.py [FOLDER]

It needs the extra `test`, and Chromium as the distribution has it.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from playwright.sync_api import Page, sync_playwright

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
COMMAND = (sys.executable, "-m", "vllm_lite")
READY, SHOWN = r"ready at (\S+),", r"is shown at (\S+) until"
FLAGS = ("--port", "0", "--num-gpu-blocks-override", "400", "--max-num-seqs", "8", "--swap-space", "0.006")
MODELS = """
models_max: 1
defaults: {num_gpu_blocks_override: 200, max_num_seqs: 4}
models:
  storyteller: {model: demo, aliases: [gpt-4o]}
  editor: {model: demo, max_model_len: 600}
  translator: {model: demo, kv_cache_dtype: fp8_e4m3}
  broken: {model: demo, max_modell_len: 5}
"""
STORY = "Once upon a time there was a brave bear who lived in a warm cave with all of its friends. One day "
NUM_REQUESTS, NUM_TOKENS = 10, 1500
SHOWN_STEP = 1000
DEADLINE_S = 300
SHOWN_MS = 3000
"""Milliseconds that the page watches before its picture is taken."""


def main() -> int:
    folder = Path(sys.argv[1]) if sys.argv[1:] else FOLDER
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        print("no Chromium is installed", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as driver:
        trace = str(Path(scratch) / "trace")
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 860})
        with started(READY, "serve", *FLAGS, "--record", trace) as url:
            take_live(page, url, folder / "live.png")
        with started(SHOWN, "replay", trace, "--page", "--port", "0") as url:
            take_trace(page, url, folder / "replay.png")
        models = Path(scratch) / "models.yaml"
        models.write_text(MODELS)
        with started(READY, "serve", "--models", str(models), "--device", "cpu", "--port", "0") as url:
            take_models(page, url, folder / "models.png")
        browser.close()
        subprocess.run([*COMMAND, "replay", trace, "--plot", str(folder / "trace.png")], check=True)
    return 0


def take_live(page: Page, url: str, place: Path) -> None:
    """Take a picture of a server's page, with running, waiting and preempted requests."""
    page.goto(url)
    page.click("text=Live")
    asked = [threading.Thread(target=ask, args=(url, number)) for number in range(NUM_REQUESTS)]
    for thread in asked:
        thread.start()
    page.wait_for_selector(".legend .host:not(:text-is('held on the host: 0'))")
    page.hover(".blocks >> nth=0", position={"x": 30, "y": 6})
    page.wait_for_selector(".block:has-text('hash')")
    page.screenshot(path=place)
    for thread in asked:
        thread.join()


def take_models(page: Page, url: str, place: Path) -> None:
    """Take a picture of a router's page: a sleeping model, one that answers, one that was never used, and a faulty
    one."""
    page.set_viewport_size({"width": 1100, "height": 760})
    ask(url, 0, model="editor", max_tokens=40)
    asked = [
        threading.Thread(target=ask, args=(url, number), kwargs={"model": "storyteller"}) for number in range(1, 7)
    ]
    for thread in asked:
        thread.start()
    page.goto(url)
    page.click("text=Live")
    page.click("#models button:text-is('storyteller')")
    page.wait_for_selector(".engine tbody tr td button")
    page.wait_for_timeout(SHOWN_MS)
    page.screenshot(path=place)
    for thread in asked:
        thread.join()


def take_trace(page: Page, url: str, place: Path) -> None:
    """Take a picture of a trace's page, at a step with waiting requests."""
    page.set_viewport_size({"width": 1100, "height": 940})
    page.goto(f"{url}#step={SHOWN_STEP}")
    page.wait_for_selector("#connection:has-text('recorded')")
    page.wait_for_selector("#at:has-text('after the beginning')")
    page.wait_for_timeout(SHOWN_MS // 3)
    page.screenshot(path=place)


def ask(url: str, number: int, **more: object) -> None:
    body = {"prompt": STORY * 2, "max_tokens": NUM_TOKENS, "ignore_eos": True, "request_id": f"story-{number}", **more}
    httpx.post(f"{url}/v1/completions", json=body, timeout=DEADLINE_S)


@contextmanager
def started(ready: str, *words: str) -> Iterator[str]:
    """Run a serving command. Yields the address in its output line that matches `ready`."""
    with subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, text=True) as process:
        try:
            for line in process.stdout or ():
                if found := re.search(ready, line):
                    yield found.group(1)
                    return
        finally:
            process.terminate()


if __name__ == "__main__":
    sys.exit(main())
