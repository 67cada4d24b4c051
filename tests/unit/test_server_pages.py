"""Pages for people: whole in their files, with a policy under which a browser runs nothing else."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from tests.deadlines import scaled
from vllm_lite.server.openai import openapi
from vllm_lite.server.pages import pages
from vllm_lite.server.processes import http_server
from vllm_lite.server.route_table import ROUTES, TableRoute, example_of

FOLDER = Path(pages.__file__).parent


def read(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


FILES = sorted({*pages.PAGES.values(), *(path.removeprefix("/") for path in pages.PARTS)})


@pytest.mark.parametrize("name", FILES)
def test_pages_load_nothing_from_other_servers(name: str) -> None:
    text = read(name).decode().replace('src="page.js"', "")
    assert not re.search(r"(src|srcset)=|@import|url\(|https?://(?!\$)", text)
    assert "innerHTML" not in text, "what models write is text"
    assert "eval" not in text.replace("evaluate", "")


def test_the_page_is_small() -> None:
    assert sum(len(read(name)) for name in FILES if name.startswith("page.")) < 100_000


@pytest.mark.parametrize("name", sorted(set(pages.PAGES.values())))
def test_a_page_works_behind_a_proxy_that_adds_a_path(name: str) -> None:
    text = read(name).decode()
    assert not re.search(r"<[^>]* (on\w+|style)=", text), "the policy does not let it run"
    links = re.findall(r'href="([^"]*)"', text)
    assert links
    assert not [link for link in links if link.startswith("/") or (":" in link and link != "data:,")]


def test_the_policy_names_the_script_of_the_page() -> None:
    page = read("docs.html")
    script = page.split(b"<script>")[1].split(b"</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    policy = pages.policy(page)
    assert f"script-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none'; connect-src 'self'; ")
    assert "unsafe" not in policy
    assert pages.policy(page.replace(b"const ", b"const  ")) != policy
    files = pages.policy(read("page.html"))
    assert "script-src 'self'; style-src 'self';" in files
    assert "unsafe" not in files


@pytest.mark.parametrize("name", ["docs.html", "page.js"])
@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_a_script_is_one(name: str, tmp_path: Path) -> None:
    script, text = tmp_path / "page.js", read(name)
    script.write_bytes(text.split(b"<script>")[1].split(b"</script>")[0] if name.endswith(".html") else text)
    subprocess.run(["node", "--check", script], check=True, timeout=scaled(60), capture_output=True)


def test_chats_stand_first_and_bodies_have_an_example() -> None:
    document = openapi.document()
    assert next(iter(document["paths"])) == "/v1/chat/completions"
    for path, methods in document["paths"].items():
        for about in methods.values():
            for content in about.get("requestBody", {}).get("content", {}).values():
                fields = document["components"]["schemas"][content["schema"]["$ref"].split("/")[-1]]["properties"]
                assert content["example"].keys() <= fields.keys(), path


@pytest.mark.parametrize("route", [route for route in ROUTES if route.batch is not None], ids=lambda route: route.path)
def test_routes_of_batches_have_bodies_and_examples(route: TableRoute) -> None:
    assert route.method == "post"
    assert route.body is not None
    assert not route.batch or route.batch in {field.encode_name for field in msgspec.structs.fields(route.body)}
    assert isinstance(msgspec.convert(example_of(route.path), route.body), route.body)


@pytest.mark.parametrize(
    ("tasks", "path"),
    [
        (("embed", "token_embed"), "/v1/embeddings"),
        (("score", "embed"), "/rerank"),
        (("token_embed",), "/pooling"),
        (("token_classify",), "/token_classify"),
        (("classify",), "/classify"),
    ],
)
def test_the_greeting_has_a_route_of_the_table_for_every_task(tasks: tuple[str, ...], path: str) -> None:
    engine = SimpleNamespace(pooler=SimpleNamespace(tasks=tasks))
    found, body = http_server._first_route(engine, "m")  # type: ignore[arg-type]
    assert (found, json.loads(body)) == (path, {"model": "m", **example_of(path)})
