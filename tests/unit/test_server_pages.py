"""Pages for people: whole in one file, with a policy under which a browser runs nothing else."""

import base64
import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deadlines import scaled
from vllm_lite.server.openai import openapi
from vllm_lite.server.pages import pages

FOLDER = Path(pages.__file__).parent


def read(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


@pytest.mark.parametrize("name", sorted(set(pages.PAGES.values())))
def test_a_page_needs_nothing_from_elsewhere(name: str) -> None:
    text = read(name).decode()
    assert not re.search(r"(src|srcset)=|@import|url\(|https?://(?!\$)", text)
    assert not re.search(r"<[^>]* (on\w+|style)=", text), "the policy does not let it run"
    links = re.findall(r'href="([^"]*)"', text)
    assert links, "and all of them work behind a proxy that adds a path"
    assert not [link for link in links if link.startswith("/") or ":" in link]
    assert "innerHTML" not in text, "what models write is text"


@pytest.mark.parametrize("name", sorted(set(pages.PAGES.values())))
def test_the_policy_names_the_script_of_the_page(name: str) -> None:
    page = read(name)
    script = page.split(b"<script>")[1].split(b"</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    policy = pages.policy(page)
    assert f"script-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none'; connect-src 'self'; ")
    assert "unsafe" not in policy
    assert pages.policy(page.replace(b"const ", b"const  ")) != policy


@pytest.mark.parametrize("name", sorted(set(pages.PAGES.values())))
@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_a_script_is_one(name: str, tmp_path: Path) -> None:
    script = tmp_path / "page.js"
    script.write_bytes(read(name).split(b"<script>")[1].split(b"</script>")[0])
    subprocess.run(["node", "--check", script], check=True, timeout=scaled(60), capture_output=True)


def test_chats_stand_first_and_bodies_have_an_example() -> None:
    document = openapi.document()
    assert next(iter(document["paths"])) == "/v1/chat/completions"
    for path, methods in document["paths"].items():
        for about in methods.values():
            for content in about.get("requestBody", {}).get("content", {}).values():
                fields = document["components"]["schemas"][content["schema"]["$ref"].split("/")[-1]]["properties"]
                assert content["example"].keys() <= fields.keys(), path
