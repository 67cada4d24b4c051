"""Analyses the syntax tree of a chat template: the roles that it names, and whether it looks for parts in a content.

Both are found without rendering. The second answer may be yes by mistake: if a template loops over the lines of a text,
template_trials.py finds that it does not accept lists.
"""

from collections.abc import Iterator

from jinja2 import nodes

CONTENT = "content"


def names_role(tree: nodes.Template, role: str) -> bool:
    """Whether the template contains `role` as a complete literal, as in a comparison or a list."""
    return any(const.value == role for const in tree.find_all(nodes.Const))


def looks_into_content(tree: nodes.Template) -> bool:
    """Whether the template loops over a message's content, or takes an item of it: directly, through a variable, or
    through the parameter of a macro."""
    names = _content_names(tree)
    loops = any(_has_content(loop.iter, names) for loop in tree.find_all(nodes.For))
    return loops or any(
        isinstance(item.arg, (nodes.Slice, nodes.Const)) and not isinstance(getattr(item.arg, "value", 0), str)
        for item in tree.find_all(nodes.Getitem)
        if _has_content(item.node, names)
    )


def _content_names(tree: nodes.Template) -> set[str]:
    """The variables and parameters that may have a content, or a value derived from one."""
    flows = [*_assigned(tree), *_passed(tree)]
    names = set[str]()
    while more := {name for name, value in flows if name not in names and _has_content(value, names)}:
        names |= more
    return names


def _assigned(tree: nodes.Template) -> Iterator[tuple[str, nodes.Node]]:
    for each in tree.find_all(nodes.Assign):
        if isinstance(each.target, nodes.Name):
            yield each.target.name, each.node
        elif isinstance(each.target, nodes.NSRef):
            yield f"{each.target.name}.{each.target.attr}", each.node


def _passed(tree: nodes.Template) -> Iterator[tuple[str, nodes.Node]]:
    """Pairs of a macro's parameter and an argument that is passed for it."""
    macros = {macro.name: [param.name for param in macro.args] for macro in tree.find_all(nodes.Macro)}
    for call in tree.find_all(nodes.Call):
        params = macros.get(call.node.name, []) if isinstance(call.node, nodes.Name) else []
        yield from zip(params, call.args, strict=False)
        yield from ((each.key, each.value) for each in call.kwargs if each.key in params)


def _has_content(node: nodes.Node, names: set[str]) -> bool:
    return any(_is_content(each, names) for each in (node, *node.find_all(nodes.Expr)))


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getattr):
        name = f"{node.node.name}.{node.attr}" if isinstance(node.node, nodes.Name) else ""
        return node.attr == CONTENT or name in names
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == CONTENT
    is_get = isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr == "get"
    return is_get and any(isinstance(arg, nodes.Const) and arg.value == CONTENT for arg in node.args[:1])  # type: ignore[attr-defined]
