"""Rules that keep the tree readable and safe: permitted imports, maximum lengths, forbidden calls.

Each rule is a function from a parsed file to the list of its offences, and is shown one offender of every kind at the
end.
"""

import ast
import gc
import re
import sys
import textwrap
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "vllm_lite"

# The layout of the package from top to bottom. A part imports itself and the parts above it, nothing else; a process
# boundary is crossed by a message or by naming an entry point in a string.
LAYERS = [
    "errors",
    "choices",
    "runtime",
    "config",
    "process_settings",
    "checkpoint",
    "kv_disk",
    "protocol",
    "transport",
    "trace",
    "executor",
    "engine",
    "structured",
    "kernels",  # from here to worker: the parts that may import torch
    "parallel",
    "attention",
    "layers",
    "models",
    "worker",
    "client",
    "server",
    "ray",
    "dynamo",
    "tools",
    "__main__",
]
TENSOR_PARTS = {"kernels", "parallel", "attention", "layers", "models", "worker", "tools.bench", "tools.quantize"}
ONLY_IN = {
    "torch": TENSOR_PARTS,
    "numpy": TENSOR_PARTS,
    "safetensors": TENSOR_PARTS,
    "cupy": {"kernels"},
    "zmq": {"transport"},
    "tokenizers": {"client"},
    "llguidance": {"structured"},
    "regex": {"checkpoint", "client", "structured"},
    "ray": {"executor", "ray"},
    "dynamo": {"dynamo"},
    "transformers": {"models", "worker", "client", "tools.bench"},
}
"""Heavy packages and the parts that may import them: a client or an engine loads neither torch nor numpy."""

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60

MAX_FOLDER_FILES = 20
LISTS = {
    *("checkpoint/families", "checkpoint/quantization", "client/text/response/formats", "layers/quantized", "models"),
    *("tools/cli", "worker/drafting"),
}
"""Folders with a file for each family, format, command or drafter, however many there are and however short."""
SHORT_LINES = 40
MAX_SHORT_FILES = 27
"""Files of fewer lines of code that a single other one imports, outside of lists: each is a jump for its reader. Fold
the next one into its importer."""

FORBIDDEN_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "shelve",
    "marshal",
    "multiprocessing",
}
FORBIDDEN_CALLS = {
    "torch.load": "runs code from the file; use safetensors",
    "torch.save": "writes a pickle; use safetensors",
    "recv_pyobj": "unpickles what a peer sent",
    "send_pyobj": "pickles",
    "all_gather_object": "pickles",
    "broadcast_object_list": "pickles",
    "scatter_object_list": "pickles",
    "os.system": "goes through a shell",
    "os.popen": "goes through a shell",
    "eval": "runs text",
    "exec": "runs text",
}
"""Names of functions, or their ends after a dot, that no file calls or mentions."""
LAST_NAMES = {name.rpartition(".")[2] for name in FORBIDDEN_CALLS}

MAP_LINE = re.compile(r"^(\w+\.py) {2,}\S", re.MULTILINE)
"""A line of the docstring of a folder's __init__.py that says what is in a file."""


@cache
def parse(path: Path) -> ast.Module:
    """Parse a file once. The kept trees are frozen: collections that look at a million nodes again and again take
    longer than the rules."""
    gc.disable()
    try:
        return ast.parse(path.read_text(), str(path))
    finally:
        gc.freeze()
        gc.enable()


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def part_of(path: Path) -> str:
    """The folder or file of the package that `path` belongs to: vllm_lite/engine/core.py -> engine.

    The tools are parts of their own: vllm_lite/tools/bench/step.py -> tools.bench.
    """
    parts = path.relative_to(ROOT / PACKAGE).parts
    return ".".join(parts[: 2 if parts[0] == "tools" else 1]).removesuffix(".py")


def imports(tree: ast.AST, package: str = PACKAGE) -> Iterator[tuple[int, str]]:
    """Line and full name of every import, also inside functions. Relative ones start from `package`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: -node.level + 1 or None] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            if module == PACKAGE:
                yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, module
        elif isinstance(node, ast.Call) and last_name(node.func) in ("import_module", "__import__"):
            constants = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            yield from ((node.lineno, str(value)) for value in constants if not str(value).startswith(f"{PACKAGE}."))


def last_name(node: ast.AST) -> str:
    """Return the part of a dotted name after the last dot."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All of them, however deep in others, and not the expressions in them, which are most of a tree."""
    nodes = [tree]
    while nodes:
        yield (node := nodes.pop())
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            nodes += getattr(node, field, ())


# ---- the rules


def upward_imports(tree: ast.AST, part: str) -> list[str]:
    allowed = set(LAYERS[: LAYERS.index(part.split(".", maxsplit=1)[0]) + 1]) | {"__version__"}
    found = []
    for line, name in imports(tree, f"{PACKAGE}.{part}"):
        top, _, rest = name.partition(".")
        if top == PACKAGE and rest.split(".")[0] not in allowed:
            found.append(f"line {line}: {part} imports {name}, which lies below it")
    return found


def misplaced_packages(tree: ast.AST, part: str) -> list[str]:
    found = []
    for line, name in imports(tree):
        allowed = ONLY_IN.get(name.split(".")[0])
        if allowed is not None and part not in allowed:
            found.append(f"line {line}: {part} imports {name}, which only {sorted(allowed)} may")
    return found


def protocol_imports(tree: ast.AST) -> list[str]:
    found = []
    for line, name in imports(tree, f"{PACKAGE}.protocol"):
        top, _, rest = name.partition(".")
        own = top == PACKAGE and rest.split(".")[0] in ("protocol", "errors", "choices")
        if not own and top != "msgspec" and top not in sys.stdlib_module_names:
            found.append(f"line {line}: protocol imports {name}")
    return found


def dangerous_code(tree: ast.AST) -> list[str]:
    found = [f"line {line}: imports {name}" for line, name in imports(tree) if name.split(".")[0] in FORBIDDEN_MODULES]
    for node in ast.walk(tree):
        if last_name(node) in LAST_NAMES:
            name = ast.unparse(node)
            for forbidden, reason in FORBIDDEN_CALLS.items():
                if name == forbidden or ("." not in forbidden and "_" in forbidden and name.endswith(f".{forbidden}")):
                    found.append(f"line {node.lineno}: {name} {reason}")  # type: ignore[attr-defined]
        elif isinstance(node, ast.keyword) and node.arg in ("shell", "allow_pickle", "trust_remote_code"):
            if not (isinstance(node.value, ast.Constant) and not node.value.value):
                found.append(f"line {node.value.lineno}: {node.arg}={ast.unparse(node.value)}")
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            found += [f"line {node.lineno}: torch.load" for alias in node.names if alias.name in ("load", "save")]
    return found


def long_functions(tree: ast.AST) -> list[str]:
    return [
        f"line {node.lineno}: {node.name}() has {node.end_lineno - node.lineno + 1} lines, at most {MAX_FUNCTION_LINES}"
        for node in statements(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]


def long_file(path: Path) -> list[str]:
    lines = path.read_text().count("\n")
    return [f"{lines} lines, at most {MAX_FILE_LINES}"] if lines > MAX_FILE_LINES else []


def loops_by_hand(tree: ast.AST) -> list[str]:
    """Tests that start an event loop; as coroutines they get one, with a deadline, and closed behind them."""
    return [
        f"line {call.lineno}: {node.name}() starts a loop; make it a coroutine"
        for node in statements(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_")
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("asyncio.run", "asyncio.Runner")
    ]


def unmapped_files(path: Path) -> list[str]:
    """Find folders whose __init__.py lists some of their files, but not all."""
    named = MAP_LINE.findall(ast.get_docstring(parse(path)) or "")
    files = sorted(file.name for file in path.parent.glob("*.py") if file != path)
    return [f"maps {sorted(named)}, there are {files}"] if named and sorted(named) != files else []


# ---- the tree obeys them


def in_package() -> list[Path]:
    return [path for path in python_files(PACKAGE) if part_of(path) != "__init__"]


def obey(paths: Iterable[Path], rule: Callable[[Path], list[str]]) -> None:
    """Fail with all offences of all files."""
    offences = [f"{name_of(path)}: {offence}" for path in paths for offence in rule(path)]
    if offences:
        pytest.fail("\n".join(offences), pytrace=False)


def layout(path: Path) -> list[str]:
    part, tree = part_of(path), parse(path)
    if part == "demo_model":
        return ["the demo model is data"]
    if part.split(".")[0] not in LAYERS:
        return [f"{part} is not in the layout; DESIGN and the table above must say where it stands"]
    alone = protocol_imports(tree) if part == "protocol" else []
    return upward_imports(tree, part) + misplaced_packages(tree, part) + alone


def test_imports_go_upwards() -> None:
    obey(in_package(), layout)


def test_the_package_itself_imports_nothing_when_it_is_imported() -> None:
    tree = parse(ROOT / PACKAGE / "__init__.py")
    tree.body = [node for node in tree.body if "TYPE_CHECKING" not in ast.unparse(node).splitlines()[0]]
    assert [name for _, name in imports(tree) if name.split(".")[0] not in sys.stdlib_module_names] == []


def test_nothing_dangerous() -> None:
    obey(python_files(PACKAGE, "scripts", "examples", "benchmarks"), lambda path: dangerous_code(parse(path)))


def test_no_python_in_native_code() -> None:
    for path in (ROOT / "csrc").rglob("*"):
        if path.is_file():
            assert not re.search(r"Python\.h|torch/|pickle|\bsystem\(|popen\(", path.read_text()), name_of(path)


def test_functions_are_short() -> None:
    obey(python_files(PACKAGE, "scripts", "examples", "benchmarks", "tests"), lambda path: long_functions(parse(path)))


def test_tests_that_need_a_loop_are_coroutines() -> None:
    obey(python_files("tests"), lambda path: loops_by_hand(parse(path)))


def test_files_are_short() -> None:
    native = sorted(path for path in (ROOT / "csrc").rglob("*") if path.is_file())
    obey([*python_files(PACKAGE, "scripts", "examples", "benchmarks", "tests"), *native], long_file)


def test_a_map_of_a_folder_names_all_its_files() -> None:
    obey([path for path in python_files(PACKAGE) if path.name == "__init__.py"], unmapped_files)


def test_folders_are_not_crowded() -> None:
    sizes = Counter(path.parent for path in in_package() if path.name != "__init__.py")
    for folder, size in sizes.items():
        if str(folder.relative_to(ROOT / PACKAGE)) not in LISTS:
            assert size <= MAX_FOLDER_FILES, f"{name_of(folder)} has {size} files, at most {MAX_FOLDER_FILES}"


def test_few_short_files_have_one_importer() -> None:
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in in_package()}
    importers: dict[str, set[Path]] = {name: set() for name in names}
    for path in in_package():
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                for name in {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)} & names.keys():
                    importers[name].add(path)
    alone = [path for name, path in names.items() if len(importers[name]) == 1 and path.name != "__init__.py"]
    short = [name_of(path) for path in alone if not is_in_a_list(path) and num_code_lines(path) < SHORT_LINES]
    assert len(short) <= MAX_SHORT_FILES, "\n".join(short)


def is_in_a_list(path: Path) -> bool:
    return str(path.parent.relative_to(ROOT / PACKAGE)) in LISTS


def num_code_lines(path: Path, *, with_imports: bool = True) -> int:
    """Lines that hold neither a comment nor a docstring alone; `with_imports`: imports count."""
    left_out = [
        node
        for node in ast.walk(parse(path))
        if (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        or (not with_imports and isinstance(node, ast.Import | ast.ImportFrom))
    ]
    prose = {line for node in left_out for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    lines = enumerate(path.read_text().splitlines(), 1)
    return sum(bool(text.strip()) and not text.lstrip().startswith("#") and line not in prose for line, text in lines)


def test_the_readme_counts_the_package() -> None:
    said = re.findall(r"API and tool it has ([\d,]+)\.", (ROOT / "README.md").read_text())
    assert int(said[0].replace(",", "")) == pytest.approx(sum(map(num_code_lines, python_files(PACKAGE))), rel=0.05)


def test_dependencies_are_those_imported() -> None:
    """Every package that is imported is declared, and every one declared is imported."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {declared_name(text) for text in project["dependencies"]}
    optional = {declared_name(text) for extra in project["optional-dependencies"].values() for text in extra}
    imported = {name.split(".")[0] for path in python_files(PACKAGE) for _, name in imports(parse(path))}
    imported -= sys.stdlib_module_names | {PACKAGE}
    assert imported <= required | optional
    assert required - imported <= {"yaml"}, "declared, but nothing imports it (yaml: msgspec.yaml does)"


def declared_name(requirement: str) -> str:
    name = re.split(r"[<>=!~ \[;]", requirement)[0]
    imported = {"pyzmq": "zmq", "pillow": "PIL", "pyyaml": "yaml", "cupy-cuda12x": "cupy", "ai-dynamo": "dynamo"}
    imported["opentelemetry-sdk"] = "opentelemetry"
    return imported.get(name, name.replace("-", "_"))


# ---- the rules can tell


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("engine", "import vllm_lite.worker.sampling.sampler"),
        ("engine", "from vllm_lite.worker import sampler"),
        ("engine", "from vllm_lite import worker"),
        ("engine", "def f():\n    from vllm_lite.client.llm import LLM"),
        ("worker", "from vllm_lite.client import tokenizer"),
        ("engine", "from ..worker import sampler"),
        ("config", "if TYPE_CHECKING:\n    from vllm_lite.engine.core import EngineCore"),
        ("transport", "from vllm_lite import LLM"),
    ],
)
def test_upward_imports_are_seen(part: str, source: str) -> None:
    assert upward_imports(ast.parse(source), part)


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("worker", "from vllm_lite.engine.request import x\nfrom vllm_lite.protocol import step"),
        ("engine", "from vllm_lite import errors, runtime\nfrom .core import EngineCore\nimport heapq"),
        ("client", "import_module('vllm_lite.worker.process')"),
        ("tools.cli", "from vllm_lite import __version__"),
    ],
)
def test_downward_imports_are_allowed(part: str, source: str) -> None:
    assert upward_imports(ast.parse(source), part) == []


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("engine", "import torch"),
        ("engine", "def f():\n    import torch.nn.functional as F"),
        ("client", "from torch import Tensor"),
        ("engine", "importlib.import_module('torch')"),
        ("protocol", "import numpy as np"),
        ("worker", "import zmq"),
        ("worker", "import tokenizers"),
    ],
)
def test_misplaced_packages_are_seen(part: str, source: str) -> None:
    assert misplaced_packages(ast.parse(source), part)


@pytest.mark.parametrize(
    "source", ["import numpy", "from vllm_lite.config import EngineConfig", "from vllm_lite import log", "import yaml"]
)
def test_protocol_is_alone(source: str) -> None:
    assert protocol_imports(ast.parse(source))
    assert not protocol_imports(ast.parse("import msgspec, enum\nfrom vllm_lite.errors import X\nfrom . import step"))


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from multiprocessing import Process",
        "def f():\n    import cloudpickle",
        "torch.load('x')",
        "load = torch.load",
        "from torch import load",
        "socket.recv_pyobj()",
        "dist.all_gather_object(a, b)",
        "subprocess.run('ls', shell=True)",
        "subprocess.run('ls', shell=flag)",
        "np.load('x', allow_pickle=True)",
        "AutoModel.from_pretrained('x', trust_remote_code=True)",
        "os.system('ls')",
        "eval('1')",
    ],
)
def test_dangerous_code_is_seen(source: str) -> None:
    assert dangerous_code(ast.parse(source))


def test_harmless_code_is_not() -> None:
    source = "model.eval()\nsubprocess.run(['ls'], shell=False)\nsafetensors.torch.load_file('x')\nre.compile('x')"
    assert dangerous_code(ast.parse(source)) == []


def test_long_functions_are_seen() -> None:
    def source(lines: int) -> str:
        return "def f():\n" + "    x = 1\n" * (lines - 1)

    assert long_functions(ast.parse(source(61)))
    assert not long_functions(ast.parse(source(60)))
    assert long_functions(ast.parse("async " + source(61)))
    for outer in ("if x:", "else:", "try:", "finally:", "except E:", "case 1:", "class C:", "def f():"):
        before = {"else:": "if x: pass\n", "finally:": "try: pass\n", "except E:": "try: pass\n"}.get(outer, "")
        after = "\nfinally: pass" if outer == "try:" else ""
        inner = textwrap.indent(source(61), "  ")
        code = f"{before}{outer}\n{inner}{after}"
        if outer == "case 1:":
            code = "match x:\n" + textwrap.indent(code, "  ")
        assert long_functions(ast.parse(code)), outer


def test_loops_by_hand_are_seen() -> None:
    made = "async def main():\n        pass\n    asyncio.run(main())"
    assert loops_by_hand(ast.parse(f"def test_it():\n    {made}"))
    assert loops_by_hand(ast.parse("class T:\n  def test_it(self):\n    with asyncio.Runner() as runner:\n      pass"))
    assert not loops_by_hand(ast.parse(f"async def test_it():\n    await it()\ndef helper():\n    {made}"))


def test_long_files_and_wrong_maps_are_seen(tmp_path: Path) -> None:
    init = tmp_path / "__init__.py"
    for lines, wrong in ((500, False), (501, True)):
        init.write_text("\n" * lines)
        assert bool(long_file(init)) is wrong
    (tmp_path / "here.py").touch()
    for text, wrong in (("no map", False), ("here.py  is here", False), ("here.py  is here\ngone.py  was", True)):
        init.write_text(f'"""Files.\n\n{text}\n"""')
        parse.cache_clear()
        assert bool(unmapped_files(init)) is wrong
