"""Docstrings, comments and documents use the field's words, and docstrings begin with their noun or verb.

docs/architecture.md has the glossary. A word is banned if the field has another one, or if it is unclear without its
context; each rule is tested with texts that it rejects and accepts.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

BANNED = {
    r"whoever|whomever|whosever": "those who, or the name of the one who does it",
    r"told|tells|telling": "sends, reports, knows, says",
    r"news": "delta, new tokens",
    r"unborn|born": "not forked yet, started",
    r"last words": "last messages",
    r"(?:gives?|gave|giving|given) way": "is preempted",
    r"seats?|seated": "a row of the batch, max_num_seqs",
    r"(?:a|one|each|every|per|this|that|last|next|the|first|whose) turns?|turn's": "pass of the loop, message",
    r"pace|paced": "how often, rate",
    r"not(?:es|ed)|a note|the note": "decision, records",
    r"siblings?": "API servers",
    r"guess(?:es|ed|ing)?": "draft",
    r"heirs?|trunks?|hurr(?:y|ied)": "the field's word",
}
"""Banned patterns, and replacements."""
CODE = ("vllm_lite", "scripts", "tests", "benchmarks", "examples")
ASKS = re.compile(r"(?:What|Which|Those|Where|Whose|How|Behind|Of)\b")
"""A docstring says the noun or the verb first: "Token budget of the step", not "How many tokens a step may have"."""
FAMILY = re.compile(r"\bfamil(?:y|ies)\b", re.IGNORECASE)
"""Models have families; API servers have none."""
REMAINING: frozenset[str] = frozenset()
"""Files that still have such words. It may only shrink: a file that is clean has to leave it."""


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring and comment of a Python file, or of every paragraph of a document."""
    source = path.read_text()
    if path.suffix == ".md":
        line = 1
        for paragraph in re.split(
            r"(\n\n+)", re.sub(r"```.*?```", lambda code: "\n" * code[0].count("\n"), source, flags=re.DOTALL)
        ):
            yield line, re.sub(r"`[^`]*`|\]\([^)]*\)", " ", paragraph)
            line += paragraph.count("\n")
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, re.sub(r"`[^`]*`", " ", node.value.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], re.sub(r"`[^`]*`", " ", token.string)


def summaries(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring of a Python file: of itself, its classes, functions, constants and fields."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                if text := ast.get_docstring(node):
                    yield node.body[0].lineno, text
        for body in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            for pair in pairwise(body if isinstance(body, list) else ()):
                match pair:
                    case ast.Assign() | ast.AnnAssign() | ast.AugAssign(), ast.Expr(ast.Constant(str(text))) as own:
                        yield own.lineno, text.strip()


def offences(path: Path) -> list[str]:
    found = []
    in_server = "server" in path.parts[:-1]
    for line, text in texts(path):
        plain = " ".join(text.split())
        for pattern, better in BANNED.items():
            found += [
                f"{path}:{line}: {word!r}: {better}" for word in re.findall(rf"\b(?:{pattern})\b", plain, re.IGNORECASE)
            ]
        if in_server:
            found += [f"{path}:{line}: {word!r}: the API servers" for word in FAMILY.findall(plain)]
        if re.match(r"(?:# )?Of\b", plain):
            found.append(f"{path}:{line}: a sentence that begins with 'Of'")
    return found


def nameless(path: Path) -> list[str]:
    """Docstrings that do not begin with their noun or verb."""
    return [f"{path}:{line}: begins with {match[0]!r}" for line, text in summaries(path) if (match := ASKS.match(text))]


def files() -> list[Path]:
    documents = [path for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")] if path.name != "protocol.md"]
    return sorted([*(ROOT / "vllm_lite").rglob("*.py"), *documents, ROOT / "scripts" / "protocol_prose.md"])


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_words() -> None:
    found = {name_of(path): offences(path) for path in files()}
    wrong = [offence for name, of_file in found.items() if name not in REMAINING for offence in of_file]
    if wrong:
        pytest.fail("\n".join(wrong).replace(f"{ROOT}/", ""), pytrace=False)


def test_the_list_of_what_remains_shrinks() -> None:
    clean = [name for name in sorted(REMAINING) if not (ROOT / name).exists() or not offences(ROOT / name)]
    assert not clean, f"take these out of REMAINING: {clean}"


def test_docstrings_begin_with_their_noun() -> None:
    sources = [path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(sources) > 1000
    wrong = [line for path in sources for line in nameless(path)]
    assert not wrong, "\n".join(wrong)


# ---- the rules can tell


@pytest.mark.parametrize(
    "text",
    [
        "Of a sequence, what is known.",
        "Whoever reads it is told so.",
        "One that gave way.",
        "A seat in the batch.",
        "One turn of the loop.",
        "The pace of messages.",
        "It guesses tokens.",
        "Decisions are noted.",
    ],
)
def test_banned_words_are_seen(text: str, tmp_path: Path) -> None:
    for name, source in (("a.py", f'"""{text}"""\n'), ("b.py", f"x = 1\n# {text}\n"), ("c.md", f"# Title\n\n{text}\n")):
        (tmp_path / name).write_text(source)
        assert offences(tmp_path / name), name


@pytest.mark.parametrize(
    "source",
    [
        '"""What a module does."""\n',
        'def f():\n    """How it is done."""\n',
        'LIMIT = 3\n"""How many there may be."""\n',
        'LIMIT: int = 3\n"""Where it ends."""\n',
        'class A:\n    size: int\n    """Those that count."""\n',
        'class A:\n    def __init__(self):\n        self.size = 3\n        """Which it is."""\n',
        'if True:\n    LIMIT = 3\n    """What it is."""\n',
    ],
)
def test_docstrings_without_a_noun_are_seen(source: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(source)
    assert nameless(tmp_path / "a.py")
    (tmp_path / "a.py").write_text(re.sub('"""[A-Z][a-z]*', '"""Maximum', source))
    assert not nameless(tmp_path / "a.py")


def test_other_words_are_not(tmp_path: Path) -> None:
    text = (
        "Drafts are taken in turn. Recording is turned off. A model family. It turns Q and K. `note` and `turn` stay."
    )
    for name, source in (("a.py", f'"""{text}"""\nturn = "a turn"\n'), ("c.md", f"{text}\n\n```\na turn\n```\n")):
        (tmp_path / name).write_text(source)
        assert not offences(tmp_path / name), name
    server = tmp_path / "server"
    server.mkdir()
    assert offences((tmp_path / "c.md").rename(server / "c.md"))
