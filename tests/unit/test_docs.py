"""The documents name files, classes and links that exist, and the tables made from the sources are current.

What a document names is checked with four rules: a path between backticks, or its end, is a tracked file or folder; a
test behind `::` is in its file; a dotted name is a module of the package; a link leads to a file and, behind #, to a
heading of it. In the two pages that explain the engine every CamelCase name is one of the sources.
"""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

from tests.deadlines import scaled

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import docs_tables  # noqa: E402 - found only once scripts/ is on the path

from vllm_lite import __version__  # noqa: E402
from vllm_lite.checkpoint.config_json import ENCODERS, FAMILIES  # noqa: E402
from vllm_lite.protocol import PROTOCOL_VERSION  # noqa: E402
from vllm_lite.server.config import ServeConfig  # noqa: E402

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks" / "README.md"])
EXPLAINED = ("architecture.md", "life-of-a-request.md")
"""Pages in which names of classes and functions are checked as well."""
MAX_TERMS = 60

NOT_OURS = {
    *("config.json", "tokenizer.json", "generation_config.json", "model.safetensors", "*.safetensors"),
    *("vocab.json", "merges.txt", "tekken.json", "chat_template.json"),
    *("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"),
    *("pytorch_model.bin", "server.key", "in.jsonl", "out.jsonl", "load.png", "libvllm_lite_cpu.so"),
    *("build/", "dist/", ".venv/", "modeling_*.py"),
    *("PEERS/runs", "FOLDER/for/NAME/client.key_secret"),
}
"""Files of checkpoints, of users and of builds."""
NOT_PATHS = re.compile(r"org/model|module:Class|float8|fp8|https?:|[A-Z]+ /")
NOT_NAMES = {"OpenAI", "GenAI", "CTranslate2", "OpenVINO", "PagedAttention", "FlashAttention"}

PATH = re.compile(r"[\w.*-]+(?:/[\w.*-]+)*/?")
ENDINGS = (".py", ".pyi", ".cpp", ".h", ".cuh", ".cu", ".mjs", ".md", ".json", ".toml", ".yaml", ".yml", ".txt", "/")
LINK = re.compile(r"\]\(([^)\s]+)\)")
CAMEL = re.compile(r"\b(?:[A-Z][a-z0-9]+){2,}\b(?:\.\w+)*")


@cache
def tracked() -> frozenset[str]:
    """Files of the source tree that are not ignored, and their folders."""
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=scaled(30),
        check=True,
    )
    names = {name for name in done.stdout.splitlines() if (ROOT / name).exists()}
    return frozenset(names | {f"{parent}/" for name in names for parent in Path(name).parents})


@cache
def words() -> frozenset[str]:
    sources = [path for folder in ("vllm_lite", "csrc") for path in (ROOT / folder).rglob("*") if path.is_file()]
    code = [path.read_text() for path in sources if path.suffix in (".py", ".cpp", ".h", ".cuh")]
    return frozenset(re.findall(r"\w+", "\n".join(code)))


def exists(path: str) -> bool:
    """Whether a path as documents write them, perhaps only its end and perhaps with *, is in the tree."""
    if path.endswith("/") or any(fnmatch(path, pattern) for pattern in NOT_OURS):
        return path in NOT_OURS or any(name == path or name.endswith(f"/{path}") for name in tracked())
    return any(fnmatch(name, path) or fnmatch(name, f"*/{path}") for name in tracked())


def prose(text: str) -> str:
    """`text` without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def wrong_paths(text: str) -> Iterator[str]:
    for quoted in re.findall(r"`([^`\n]+)`", prose(text)):
        for path in quoted.split():
            plain = path.split("::")[0]
            if PATH.fullmatch(plain) and plain.endswith(ENDINGS) and not NOT_PATHS.search(quoted) and not exists(plain):
                yield f"`{path}` is not in the tree"


def wrong_tests(text: str) -> Iterator[str]:
    for path, name in re.findall(r"\b(tests/[\w/]+\.py)::(\w+)", text):
        if f"def {name}(" not in (ROOT / path).read_text():
            yield f"{path} has no {name}"


def wrong_modules(text: str) -> Iterator[str]:
    for name in re.findall(r"\bvllm_lite(?:\.\w+)+", text):
        parts = [part for part in name.split(".") if part not in ("py", "errors")]
        path = "/".join(part for part in parts if part.islower())
        if not ((ROOT / f"{path}.py").exists() or (ROOT / path).is_dir()):
            yield f"{name} is not a module"


def wrong_links(page: Path, text: str) -> Iterator[str]:
    for link in LINK.findall(text):
        if "://" in link:
            continue
        target, _, heading = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        if not path.exists():
            yield f"the link {link} leads nowhere"
        elif heading and heading not in headings(path.read_text()):
            yield f"{path.name} has no heading #{heading}"


def headings(text: str) -> set[str]:
    """Anchors as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


def wrong_names(text: str) -> Iterator[str]:
    for quoted in re.findall(r"`([^`\n]+)`", prose(text)):
        for name in CAMEL.findall(quoted):
            if name not in NOT_NAMES and not set(name.split(".")) <= words():
                yield f"`{name}` is in no source"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_and_names_in_pages_exist(page: Path) -> None:
    text = page.read_text()
    found = [*wrong_paths(text), *wrong_tests(text), *wrong_modules(text), *wrong_links(page, text)]
    found += wrong_names(text) if page.name in EXPLAINED else []
    assert not found, "\n".join([str(page.relative_to(ROOT)), *found])


def test_tables_are_current() -> None:
    for path, text in docs_tables.files().items():
        assert path.read_text() == text, f"{path.name} is out of date; run `make docs`"


def test_every_folder_has_a_docstring() -> None:
    for name, what in docs_tables.folders():
        assert what, f"{name} has no docstring"


def test_the_reading_list() -> None:
    paths = docs_tables.reading_list(docs_tables.LIFE.read_text())
    assert 35 <= len(paths) <= 45
    assert [str(path) for path in paths if not path.exists()] == []
    assert len(set(paths)) == len(paths)
    assert [str(path) for path in paths if num_code_lines(path) < 20] == []


def num_code_lines(path: Path) -> int:
    """Lines of a Python file that are not comments, docstrings or blanks."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = text.replace(ast.get_docstring(node, clean=False) or "\0", "")
    return sum(bool(line.strip(' "')) and not line.strip().startswith("#") for line in text.splitlines())


def test_the_readme_counts_the_core() -> None:
    """To a twentieth; test_layers.py counts the whole package."""
    num_files, num_lines = re.findall(r"\((\d+) files, ([\d,]+) lines of code\)", (ROOT / "README.md").read_text())[0]
    paths = docs_tables.reading_list(docs_tables.LIFE.read_text())
    assert int(num_files) == len(paths)
    assert int(num_lines.replace(",", "")) == pytest.approx(sum(map(num_code_lines, paths)), rel=0.05)


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 700, "the README is for a newcomer with two minutes: put details on a page of docs/"
    assert text.count("\n") <= 100


def test_the_glossary_is_short_and_sorted() -> None:
    section = (ROOT / "docs/architecture.md").read_text().split("## Glossary", 1)[1]
    terms = [
        term for term in re.findall(r"^\| ([^|]+) \| .+ \|$", section, re.MULTILINE) if term not in ("term", "---")
    ]
    assert terms == sorted(terms, key=str.lower)
    assert 40 <= len(terms) <= MAX_TERMS


def test_every_setting_is_on_a_page() -> None:
    text = "\n".join(page.read_text() for page in PAGES if page.name not in ("protocol.md", "CHANGELOG.md"))
    named = set(re.findall(r"--([a-z][a-z-]+)", text.replace("--no-", "--")))
    named |= {word.replace("_", "-") for word in re.findall(r"\w+", text)}
    silent = [name for name in ServeConfig.__struct_fields__ if name.replace("_", "-") not in named]
    assert silent == [], "docs/command-line.md has a table for settings that no other page has"


def test_models_that_only_transformers_cannot_serve_are_in_italics() -> None:
    """Models that have a native implementation are served, whatever transformers' code of them does."""
    section = (ROOT / "docs/models.md").read_text().split("Those in italics have a native implementation")[1]
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \|$", section.split("\n\n", 2)[1], re.MULTILINE)
    names = [name for row in rows[2:] for name in row.split(", ")]
    served = [architecture.lower() for architecture in (*FAMILIES, *ENCODERS)]
    assert len(names) > 10
    for name in names:
        stem = name.strip("* ").replace("-", "").lower()
        assert any(each.startswith(stem) for each in served) is name.startswith("*"), name


def test_no_message_sends_a_user_to_a_page() -> None:
    """An installed wheel has no pages, so messages say what to do. Docstrings may cite pages."""
    for path in sorted((ROOT / "vllm_lite").rglob("*.py")):
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                assert not re.search(r"\w\.md\b", node.value), f"{path}:{node.lineno} cites {node.value!r}"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/README.md").read_text()
    for page in PAGES:
        if page != ROOT / "docs/README.md":
            assert f"{page.name})" in index, f"docs/README.md does not name {page.name}"


def test_every_result_is_cited() -> None:
    """A result that no page cites is read by nobody, and becomes outdated unnoticed."""
    text = "\n".join(page.read_text() for page in PAGES)
    results = sorted(path.name for path in (ROOT / "benchmarks/results").iterdir())
    assert len(results) > 10
    assert [name for name in results if name not in text] == []


def test_results_have_the_keys_that_programs_read() -> None:
    folder = ROOT / "benchmarks/results"
    peers = json.loads((folder / "peers-cpu.json").read_text())
    kernels = [json.loads(path.read_text()) for path in folder.glob("*-kernels.json")]
    assert kernels
    for result in (peers, *kernels):
        assert {"device", "date", "commit", "rows"} <= result.keys()
        assert result["rows"]
    of_peers = {"model", "dtype", "workload", "metric", "ours", "peer", "best_peer", "ratio"}
    assert all(of_peers <= row.keys() for row in peers["rows"])
    for row in (row for result in kernels for row in result["rows"]):
        assert {"kernel", "shape", "limit", "share"} <= row.keys()
        assert len({"gb_s", "tflop_s"} & row.keys()) == 1


def test_programs_are_named_where_they_are_found() -> None:
    places = [*PAGES, ROOT / "Makefile", *(ROOT / ".ci").iterdir()]
    text = "\n".join(place.read_text() for place in places)
    programs = [path for folder in ("scripts", "benchmarks") for path in (ROOT / folder).glob("*.py")]
    started = [path for path in programs if '__name__ == "__main__"' in path.read_text() or path.name == "__main__.py"]
    assert len(started) > 10
    assert [path.name for path in started if path.name not in text and path.name != "__main__.py"] == []


def test_the_changelogs_newest_release_is_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    sections = text.split("\n## ")[1:]
    newest = next(section for section in sections if section.split()[0] != "Unreleased")
    assert newest.split()[0] == __version__
    versions = re.findall(r"Protocol version (\d+)", text)
    assert versions[0] == f"{PROTOCOL_VERSION}", "the newest section that names one, released or not"


def test_the_changelog_has_ten_lines_a_version() -> None:
    sections = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]
    long = [section.split()[0] for section in sections if section.count("\n- ") > 10]
    assert not long, f"more than ten lines: {long}; leave out what a user does not meet"


def test_lists_of_test_files_name_files_that_exist() -> None:
    """The lists name tests that `make quick` leaves out, or that are not run against a wheel: a renamed file must not
    slip in."""
    slow = re.findall(r"^SLOW := ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = [f"tests/unit/test_{name}.py" for name in slow[0].replace("\\\n", " ").split()]
    sources = re.findall(r"tests/\w+/test_\w+\.py", (ROOT / ".ci/test-wheel").read_text())
    assert len(named) > 5
    assert len(sources) > 2
    assert [name for name in named + sources if not (ROOT / name).exists()] == []


# ---- the rules can tell


@pytest.mark.parametrize("text", ["`engine/gone.py`", "see `no_such/`", "`vllm_lite/engine/c*re2.py`", "`a.cuh`"])
def test_missing_paths_are_found(text: str) -> None:
    assert list(wrong_paths(text))


def test_missing_tests_are_found() -> None:
    assert list(wrong_tests("    pytest tests/unit/test_docs.py::test_gone\n")) == [
        "tests/unit/test_docs.py has no test_gone"
    ]
    assert not list(wrong_tests("tests/unit/test_docs.py::test_missing_tests_are_found"))


def test_existing_names_are_accepted() -> None:
    text = "`engine/core.py`, `vllm_lite/`, `config.json`, `tests/kernels/*_cases.py`, `/v1/models`, `a/b`, `org/model`"
    assert not list(wrong_paths(text))
    assert not list(wrong_modules("vllm_lite.engine.core.EngineCore"))
    assert not list(wrong_names("`EngineCore.step` and `OpenAI`"))


def test_other_names_and_links_are_seen() -> None:
    assert list(wrong_modules("vllm_lite.engine.gone"))
    assert list(wrong_names("`EngineCore.leap`"))
    assert list(wrong_names("`EngineKernel`"))
    page = ROOT / "docs/README.md"
    for link in ("[a](gone.md)", "[a](#gone)", "[a](architecture.md#gone)"):
        assert list(wrong_links(page, link)), link
    assert not list(wrong_links(page, "[a](architecture.md#glossary), [b](#documents), [c](https://example.org)"))
