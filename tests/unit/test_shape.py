"""The package keeps its shape: its central files stay small and name no feature, modules do not import each other in
circles, classes have different names, and no code is repeated.

Each bar is the value on the day when its rule was written, lines rounded up to the next ten. It may only fall.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.unit.test_layers import PACKAGE, ROOT, name_of, num_code_lines, parse, python_files

HEARTS = {
    "engine/scheduling/scheduler.py": (240, 13),
    "engine/blocks/manager.py": (250, 8),
    "worker/model_runner.py": (190, 0),
    "worker/batch/input_batch.py": (230, 4),
    "client/engines/session.py": (300, 6),
}
"""The files through which every feature passes: the most lines of code, and the most lines that name a feature. A
feature is a part or a handler that they call without knowing it."""
FEATURES = re.compile(
    r"draft|adapter|lora|grammar|mask|pooling|prompt_logprob|expert|media|image|disk|host|state|embed", re.IGNORECASE
)
RUN = 8
"""Equal lines of code in a row, in two files, that count as repeated, unless they are very short."""
MIN_RUN_CHARACTERS = 160
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


def circles(graph: Mapping[str, set[str]]) -> list[str]:
    """Modules that import each other, directly or through others: left over when those without imports are removed,
    again and again, and then those that nothing imports."""
    left = {name: set(of) - {name} for name, of in graph.items()}
    while True:
        importers = defaultdict[str, set[str]](set)
        for name, of in left.items():
            for each in of:
                importers[each].add(name)
        ends = {name for name, of in left.items() if not of or not importers[name]}
        if not ends:
            return sorted(left)
        left = {name: of - ends for name, of in left.items() if name not in ends}


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
        assert num_code_lines(path) <= most_lines, f"{name}: move what a feature adds to its part"
        lines = sorted(lines_with_features(parse(path)))
        assert len(lines) <= most_features, f"{name} names features in lines {lines}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in python_files(PACKAGE)}
    assert circles({name: imported(parse(path), paths) for name, path in paths.items()}) == []


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
    sources = {"a": "def f():\n    from b import x", "b": "import c", "c": "if x:\n    import a", "d": "import a"}
    assert circles({name: imported(ast.parse(text), sources) for name, text in sources.items()}) == ["a", "b", "c"]
    sources["c"] = "if TYPE_CHECKING:\n    import a"
    assert circles({name: imported(ast.parse(text), sources) for name, text in sources.items()}) == []


def test_repeated_code_is_seen() -> None:
    run = "\n".join(f"first_number_{i} = second_number_{i}" for i in range(RUN))
    assert repeating({"a": run, "b": f"import x\n\n{run}  \n", "c": run.replace("_3", "_4")}) == {("a", "b")}
    assert not repeating({"a": "pass\n" * RUN, "b": "pass\n" * RUN})


def test_the_bars_name_files_that_exist() -> None:
    assert all((Path(ROOT) / PACKAGE / name).is_file() for name in HEARTS)
