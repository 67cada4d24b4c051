"""Write the tables and counts in the documents that come from the sources: make docs

The table of folders in docs/architecture.md holds the first sentence of each folder's docstring, in the order of the
layers; that of families in docs/models.md names each architecture with its files and its test checkpoints; the reading
list of docs/life-of-a-request.md says how many files and lines it names. With --check nothing is written, and the exit
status is 1 if a document is out of date.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "vllm_lite"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
LIFE = ROOT / "docs" / "life-of-a-request.md"
MODELS = ROOT / "docs" / "models.md"
FOLDERS = re.compile(r"(<!-- folders: written by `make docs` -->\n).*?(<!-- end -->)", re.DOTALL)
FAMILIES = re.compile(r"(<!-- families: written by `make docs` -->\n).*?(<!-- end -->)", re.DOTALL)
COUNT = re.compile(r"\*\*\d+ files, [\d,]+ lines\*\*")
READING = re.compile(r"^\| [a-z][^|]* \| (`[^|]+`) \|$", re.MULTILINE)
"""A row of the reading list: a stage of the request's path, and the files to read for it."""


def layers() -> tuple[list[str], set[str]]:
    """The parts of the package from top to bottom, and those of them that may import torch."""
    sys.path.insert(0, str(ROOT))
    from tests.unit.test_layers import LAYERS, TENSOR_PARTS

    return LAYERS, TENSOR_PARTS


def purpose(path: Path) -> str:
    """The first paragraph of a module's docstring, without its final full stop."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split()).removesuffix(".")


def folders() -> Iterator[tuple[str, str]]:
    """Yield the rows of the table: a path below the package, and its purpose."""
    order, tensor_parts = layers()
    for part in order:
        if (PACKAGE / f"{part}.py").exists():
            yield f"`{part}.py`", purpose(PACKAGE / f"{part}.py")
        for path in sorted((PACKAGE / part).rglob("__init__.py")):
            name = path.parent.relative_to(PACKAGE).as_posix()
            mark = " (T)" if {name.replace("/", "."), part} & tensor_parts else ""
            yield f"`{name}/`{mark}", purpose(path)


def architecture(text: str) -> str:
    """docs/architecture.md with today's table of folders."""
    rows = "".join(f"| {name} | {what} |\n" for name, what in folders())
    return FOLDERS.sub(lambda match: f"{match[1]}| | |\n| --- | --- |\n{rows}{match[2]}", text)


def families() -> Iterator[str]:
    """The rows of docs/models.md: architectures, their two files, and the variants that tests compare with
    transformers."""
    sys.path.insert(0, str(ROOT))
    from tests.families.all import VARIANTS
    from vllm_lite.checkpoint.config_json import FAMILIES as READERS
    from vllm_lite.models.registry import MODELS as CLASSES

    def link(name: str) -> str:
        lines = (PACKAGE / name).read_text().count("\n")
        return f"[`{Path(name).name}`](../vllm_lite/{name}), {lines} lines"

    for architecture in sorted(READERS):
        module = CLASSES[architecture].split(":")[0].split(".")[-1]
        names = [variant.name for variant in VARIANTS if variant.model == architecture]
        files = f"{link(f'checkpoint/families/{READERS[architecture]}.py')} | {link(f'models/{module}.py')}"
        yield f"| `{architecture}` | {files} | {', '.join(names) or 'the tests of the engine'} |\n"


def models(text: str) -> str:
    """docs/models.md with today's table of families."""
    head = "| architecture | reads config.json | computes it | tiny checkpoints that are held to transformers |\n"
    rows = head + "| --- | --- | --- | --- |\n" + "".join(families())
    return FAMILIES.sub(lambda match: f"{match[1]}{rows}{match[2]}", text)


def reading_list(text: str) -> list[Path]:
    """The files that the reading list of docs/life-of-a-request.md names."""
    section = text.split("## A weekend's reading", 1)[1].split("\n## ", 1)[0]
    names = [name for row in READING.findall(section) for name in re.findall(r"`([^`]+)`", row)]
    return [PACKAGE / name for name in names]


def life(text: str) -> str:
    """docs/life-of-a-request.md with today's count of the lines to read, in thousands; one that is less than a thousand
    off stays, so that few changes of code touch the page."""
    paths = [path for path in reading_list(text) if path.exists()]
    lines = sum(path.read_text().count("\n") for path in paths)
    said = COUNT.search(text)
    if said:
        num_files, num_lines = (int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", said[0]))
        if num_files == len(paths) and abs(num_lines - lines) < 1000:
            return text
    return COUNT.sub(f"**{len(paths)} files, {round(lines, -3):,} lines**", text)


def files() -> dict[Path, str]:
    """The documents and what should be in them."""
    return {
        ARCHITECTURE: architecture(ARCHITECTURE.read_text()),
        LIFE: life(LIFE.read_text()),
        MODELS: models(MODELS.read_text()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a document is out of date")
    check = parser.parse_args().check
    stale = [path for path, text in files().items() if path.read_text() != text]
    for path in stale:
        if check:
            print(f"{path.name} is out of date; run `make docs`")
        else:
            path.write_text(files()[path])
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
