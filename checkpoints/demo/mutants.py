"""Mutants: copies of a function with one small mistake each, which a function's tests should detect.

Mutation testing is described in DeMillo, Lipton and Sayward, "Hints on Test Data Selection" (IEEE Computer, 1978).
"""

import ast
import copy
from collections.abc import Iterator
from typing import Any

_COMPARISONS: dict[type[ast.cmpop], tuple[ast.cmpop, ...]] = {
    ast.Lt: (ast.LtE(), ast.GtE()),
    ast.LtE: (ast.Lt(), ast.Gt()),
    ast.Gt: (ast.GtE(), ast.LtE()),
    ast.GtE: (ast.Gt(), ast.Lt()),
    ast.Eq: (ast.NotEq(),),
    ast.NotEq: (ast.Eq(),),
    ast.In: (ast.NotIn(),),
    ast.NotIn: (ast.In(),),
}
_OPERATORS: dict[type[ast.operator], ast.operator] = {
    ast.Add: ast.Sub(),
    ast.Sub: ast.Add(),
    ast.Mult: ast.Add(),
    ast.Mod: ast.FloorDiv(),
    ast.FloorDiv: ast.Mod(),
    ast.Div: ast.FloorDiv(),
}
_SWAPPED = (
    {"any": "all", "all": "any", "min": "max", "max": "min"}
    | {"startswith": "endswith", "endswith": "startswith", "upper": "lower", "lower": "upper"}
    | {"isupper": "islower", "islower": "isupper", "isdigit": "isalpha", "isalpha": "isdigit"}
)


def _changed(node: ast.AST, field: str, value: Any) -> ast.AST:
    changed = copy.copy(node)
    setattr(changed, field, value)
    return changed


def _conditions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node with one of its conditions missing or exchanged."""
    if isinstance(node, ast.Compare):
        for number, operator in enumerate(node.ops):
            for other in _COMPARISONS.get(type(operator), ()):
                yield _changed(node, "ops", [*node.ops[:number], other, *node.ops[number + 1 :]])
    elif isinstance(node, ast.BoolOp):
        yield _changed(node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And())
        yield from node.values
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.If | ast.IfExp):
        yield _changed(node, "test", ast.Constant(True))
        yield _changed(node, "test", ast.Constant(False))
    elif isinstance(node, ast.comprehension):
        for number in range(len(node.ifs)):
            yield _changed(node, "ifs", node.ifs[:number] + node.ifs[number + 1 :])


def _replacements(node: ast.AST) -> Iterator[ast.AST]:
    yield from _conditions(node)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        yield _changed(node, "op", _OPERATORS[type(node.op)])
    elif isinstance(node, ast.Constant) and isinstance(node.value, int) and not isinstance(node.value, bool):
        yield ast.Constant(node.value + 1)
        yield ast.Constant(node.value - 1)
    elif isinstance(node, ast.Name) and node.id in _SWAPPED:
        yield _changed(node, "id", _SWAPPED[node.id])
    elif isinstance(node, ast.Attribute) and node.attr in _SWAPPED:
        yield _changed(node, "attr", _SWAPPED[node.attr])


def _with_one_change(node: ast.AST) -> Iterator[ast.AST]:
    """Yield copies of a tree with one replacement each. While loops stay as they are, because they might not end."""
    if isinstance(node, ast.While):
        return
    yield from _replacements(node)
    for field, value in ast.iter_fields(node):
        if isinstance(value, ast.AST):
            for changed in _with_one_change(value):
                yield _changed(node, field, changed)
        elif isinstance(value, list):
            for number, item in enumerate(value):
                if isinstance(item, ast.AST):
                    for changed in _with_one_change(item):
                        yield _changed(node, field, [*value[:number], changed, *value[number + 1 :]])


def mutants(text: str) -> list[str]:
    """Return the source of each mutant of a function; those that only differ in layout are left out."""
    tree = ast.parse(text)
    texts = [ast.unparse(ast.fix_missing_locations(changed)) for changed in _with_one_change(tree)]
    return [changed for changed in dict.fromkeys(texts) if changed != ast.unparse(tree)]
