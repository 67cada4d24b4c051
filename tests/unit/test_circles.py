"""No circles: following imports, those inside functions too, never leads from a module back to it."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import vllm_lite

PACKAGE = Path(vllm_lite.__file__).parent


def modules() -> dict[str, str]:
    """The sources of all modules of the package, by name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


def runtime_statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All statements that run: not those for type checkers alone. Expressions, most of a tree, hold no import."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.expr):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield other
                yield from runtime_statements(other)
            continue
        yield child
        yield from runtime_statements(child)


def imports_of(tree: ast.Module, names: Iterable[str]) -> set[str]:
    """The modules among `names` that one imports; `from package import module` imports the module alone."""
    known, found = set(names), set[str]()
    for node in runtime_statements(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & known
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & known
            if inner - known and node.module in known:
                found.add(node.module)
    return found


def circle(sources: Mapping[str, str]) -> list[str]:
    """Modules of which each imports the one before it, the first the last; [] if there are none. One tree at a time:
    the garbage collector would go through all of them again and again."""
    try:
        TopologicalSorter(
            {name: imports_of(ast.parse(text), sources) - {name} for name, text in sources.items()}
        ).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def test_no_imports_go_round() -> None:
    assert circle(modules()) == []


def test_import_circles_are_found() -> None:
    def package(**sources: str) -> dict[str, str]:
        return {f"p.{name}": source for name, source in sources.items()}

    assert circle(package(a="from p import b", b="def f():\n    from p.a import x"))
    assert circle(package(a="import p.b", b="from p.c import y", c="from p import a"))
    assert circle(package(a="import p.b", b="try:\n    pass\nexcept OSError:\n    from p import a"))
    assert not circle(package(a="from p.b import x", b="if TYPE_CHECKING:\n    from p.a import X"))
    assert not circle(package(a="from p.b import x", b="import p.c", c="from os import path"))
