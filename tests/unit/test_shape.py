"""The package keeps its shape: its central files stay small and name no feature, modules do not import each other in
circles, classes have different names, and no code is repeated.

Each bar is the value on the day when its rule was written, lines rounded up to the next ten. It may only fall.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.unit.test_layers import PACKAGE, ROOT, name_of, num_code_lines, parse, python_files

HEARTS = {
    "engine/scheduling/scheduler.py": (210, 13),
    "engine/blocks/manager.py": (240, 8),
    "worker/model_runner.py": (170, 0),
    "worker/batch/input_batch.py": (210, 4),
    "worker/batch/rows.py": (110, 7),
    "worker/batch/block_tables.py": (90, 0),
    "client/engines/session.py": (280, 6),
}
"""The files through which every feature passes: the most lines of code, imports aside, and the most lines that name a
feature. A feature is a part or a handler that they call without knowing it."""
FEATURES = re.compile(
    r"draft|adapter|lora|grammar|mask|pooling|prompt_logprob|expert|media|image|disk|host|state|embed", re.IGNORECASE
)
RUN = 8
"""Equal lines of code in a row, in two files, that count as repeated, unless they are very short."""
MIN_RUN_CHARACTERS = 160
MAX_STEP_STATEMENTS = 15
"""Statements of ModelRunner.execute, which reads like a table of contents."""
A_PART = re.compile(r"^class (\w+)\((?:Cache|Step|Side)Part\b(?!\[Found\])", re.MULTILINE)
MAX_REPEATING = 1
"""Pairs of files with such a run: rates as the scheduler has them, and as a trace records them."""


def names(node: ast.AST) -> list[str]:
    match node:
        case ast.Name(name) | ast.Attribute(attr=name) | ast.arg(name) | ast.keyword(str(name)) | ast.alias(name):
            return [name]
        case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
            return [name]
    return []


def lines_with_features(tree: ast.AST) -> set[int]:
    return {getattr(node, "lineno", 0) for node in ast.walk(tree) for name in names(node) if FEATURES.search(name)}


def imported(tree: ast.AST, modules: Iterable[str]) -> set[str]:
    """Modules that a file imports at run time, in functions as well."""
    found, nodes = set[str](), [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            nodes += node.orelse
            continue
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        nodes += [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt | ast.ExceptHandler)]
        nodes += [case for each in ast.iter_child_nodes(node) if isinstance(each, ast.match_case) for case in each.body]
    return found & set(modules)


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Modules of which each imports the one before it, the first the last; [] if there are none."""
    try:
        TopologicalSorter({name: modules - {name} for name, modules in graph.items()}).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def repeating(texts: Mapping[str, str]) -> set[tuple[str, str]]:
    """Pairs of files that have RUN equal lines of code in a row."""
    places = defaultdict[tuple[str, ...], set[str]](set)
    for name, text in texts.items():
        stripped = [line.strip() for line in text.splitlines()]
        lines = [line for line in stripped if line and not line.startswith(("#", '"""', "import ", "from "))]
        for start in range(len(lines) - RUN + 1):
            run = tuple(lines[start : start + RUN])
            if sum(map(len, run)) > MIN_RUN_CHARACTERS:
                places[run].add(name)
    return {(a, b) for found in places.values() if len(found) > 1 for a in found for b in found if a < b}


def test_the_hearts_are_small_and_name_no_feature() -> None:
    for name, (most_lines, most_features) in HEARTS.items():
        path = ROOT / PACKAGE / name
        assert num_code_lines(path, with_imports=False) <= most_lines, f"{name}: move what a feature adds to its part"
        lines = sorted(lines_with_features(parse(path)))
        assert len(lines) <= most_features, f"{name} names features in lines {lines}"


def test_a_heart_names_no_part() -> None:
    """A feature's part is named where the engine or the worker is put together, and nowhere else."""
    parts = {name for path in python_files(PACKAGE) for name in A_PART.findall(path.read_text())}
    assert {"KVBlocks", "StateSlots", "DiskTier", "EncoderCache", "StoredMedia", "Drafts", "Rules"} <= parts
    for heart in HEARTS:
        said = {name for node in ast.walk(parse(ROOT / PACKAGE / heart)) for name in names(node)}
        assert not said & parts, heart


def test_a_step_is_read_in_fifteen_statements() -> None:
    tree = parse(ROOT / PACKAGE / "worker/model_runner.py")
    (execute,) = (each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) and each.name == "execute")
    assert sum(isinstance(each, ast.stmt) for each in ast.walk(execute)) - 2 <= MAX_STEP_STATEMENTS


def test_no_modules_import_each_other_in_a_circle() -> None:
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in python_files(PACKAGE)}
    assert circle({name: imported(parse(path), paths) for name, path in paths.items()}) == []


def test_a_class_has_a_name_of_its_own() -> None:
    """A reader has to look up a name with two meanings twice. A name should say of what the adapters, rows or sizes
    are."""
    places: dict[str, list[str]] = {}
    for path in python_files(PACKAGE):
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(name_of(path))
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_code_is_not_repeated() -> None:
    found = repeating({name_of(path): path.read_text() for path in python_files(PACKAGE)})
    assert len(found) <= MAX_REPEATING, sorted(found)


# ---- the rules can tell


def test_features_are_seen() -> None:
    for source in ("self.num_drafts = 1", "def lora(): pass", "f(mask=x)", "from a import MediaVectors"):
        assert lines_with_features(ast.parse(source)) == {1}, source
    assert not lines_with_features(ast.parse('part.prepare(step)  # a draft\n"""masks"""'))


def test_circles_are_seen() -> None:
    def found(**sources: str) -> list[str]:
        named = {f"p.{name}": source for name, source in sources.items()}
        return circle({name: imported(ast.parse(text), named) for name, text in named.items()})

    assert found(a="from p import b", b="def f():\n    from p.a import x")
    assert found(a="import p.b", b="from p.c import y", c="if x:\n    from p import a")
    assert found(a="import p.b", b="try:\n    pass\nexcept OSError:\n    from p import a")
    assert not found(a="from p.b import x", b="if TYPE_CHECKING:\n    from p.a import X")
    assert not found(a="from p.b import x", b="import p.c", c="from os import path")


def test_repeated_code_is_seen() -> None:
    run = "\n".join(f"first_number_{i} = second_number_{i}" for i in range(RUN))
    assert repeating({"a": run, "b": f"import x\n\n{run}  \n", "c": run.replace("_3", "_4")}) == {("a", "b")}
    assert not repeating({"a": "pass\n" * RUN, "b": "pass\n" * RUN})


def test_the_bars_name_files_that_exist() -> None:
    assert all((Path(ROOT) / PACKAGE / name).is_file() for name in HEARTS)
