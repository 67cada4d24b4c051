"""Extracts the texts that a chat template writes or compares with, in which a format's literals are searched for.

In Jinja's source a literal may be in parts, `'<' + dsml + 'invoke'` with `dsml` set to a constant before, or a part of
a longer one, `namespace ~ '<tool_call>'`; quotes inside of it may be escaped, and comments mention what is not written.
In the syntax tree constants are joined as the template would join them.
"""

from collections.abc import Iterator, Mapping

from jinja2 import Environment, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

UNKNOWN = "\0"
"""Placeholder for the text of an expression that is known only when the template is rendered."""
MAX_FOLDED_CHARS = 65_536
"""Maximum characters of a constant that is joined from others; a longer one is unknown, because each could double the
previous one."""
_CONTINUES_BEFORE, _CONTINUES_BEHIND = "[<|｜(", "]>|｜)"  # noqa: RUF001 - DeepSeek's literals have such letters


class _Blocks(Extension):
    """Parses {% generation %}, which is a block without effect here."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it as an instance variable

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def template_literals(source: str) -> str:
    """Join all texts of the template `source` with UNKNOWN between them. Invalid Jinja is returned unchanged."""
    environment = Environment(  # noqa: S701 - nothing is rendered
        trim_blocks=True, lstrip_blocks=True, extensions=[_Blocks, loopcontrols]
    )
    try:
        tree = environment.parse(source)
        constants = _constants(tree)
        return UNKNOWN.join(_texts(tree, constants))
    except Exception:  # besides Jinja's own errors: nested too deeply, which rendering would report
        return source


def stands_free(literal: str, text: str) -> bool:
    """Whether `literal` is in `text` other than as a part of a longer word or literal."""
    place = text.find(literal)
    while place >= 0:
        end = place + len(literal)
        before, behind = text[place - 1 : place], text[end : end + 1]
        if not (_goes_on(before, literal[0], _CONTINUES_BEFORE) or _goes_on(behind, literal[-1], _CONTINUES_BEHIND)):
            return True
        place = text.find(literal, place + 1)
    return False


def _goes_on(neighbour: str, edge: str, brackets: str) -> bool:
    """Whether a neighbouring letter continues a literal with this edge: a word, or brackets of any kind."""
    if not neighbour:
        return False
    if edge.isalnum() or edge == "_":
        return neighbour.isalnum() or neighbour == "_"
    return edge in "<>[]|" and neighbour in brackets


def _constants(tree: nodes.Template) -> dict[str, str]:
    """Find the names that are always set to the same text; both templates of a checkpoint may set them."""
    found: dict[str, str] = {}
    for each in tree.find_all(nodes.Assign):
        if isinstance(each.target, nodes.Name):
            name, text = each.target.name, _folded(each.node, found)
            found[name] = text if found.get(name, text) == text else UNKNOWN
    return {name: text for name, text in found.items() if text and UNKNOWN not in text}


def _folded(node: nodes.Node, constants: Mapping[str, str]) -> str:
    """Join the constant texts of an expression, with UNKNOWN for the rest."""
    if isinstance(node, nodes.Const):
        return node.value if isinstance(node.value, str) else UNKNOWN
    if isinstance(node, nodes.TemplateData):
        return node.data
    if isinstance(node, nodes.Name):
        return constants.get(node.name, UNKNOWN)
    if isinstance(node, nodes.Add | nodes.Concat):
        parts = (node.left, node.right) if isinstance(node, nodes.Add) else node.nodes
        joined = "".join(_folded(part, constants) for part in parts)
        return joined if len(joined) <= MAX_FOLDED_CHARS else UNKNOWN
    return UNKNOWN


def _texts(node: nodes.Node, constants: Mapping[str, str]) -> Iterator[str]:
    """Yield the texts of a tree. Neighbours in one output are joined, as in the rendering."""
    if isinstance(node, nodes.Output):
        yield "".join(_folded(part, constants) for part in node.nodes)
        for part in node.nodes:
            yield from _inner(part, constants)
    elif isinstance(node, nodes.Const | nodes.TemplateData | nodes.Add | nodes.Concat):
        yield _folded(node, constants)
        yield from _inner(node, constants)
    else:
        for child in node.iter_child_nodes():
            yield from _texts(child, constants)


def _inner(node: nodes.Node, constants: Mapping[str, str]) -> Iterator[str]:
    """Yield the texts in the parts of an expression that remained unknown."""
    if isinstance(node, nodes.Add | nodes.Concat):
        for part in node.iter_child_nodes():
            yield from _inner(part, constants)
    elif not isinstance(node, nodes.Const | nodes.TemplateData | nodes.Name):
        for child in node.iter_child_nodes():
            yield from _texts(child, constants)
