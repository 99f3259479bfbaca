"""Reads from a test's source whether it asserts anything whatever the values are that it loops over."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum

SOME = "some"
HOLD = {SOME, "run_ranks"}
"""Functions whose result is never empty: `tests/graphs/nonempty.py`, and what every rank returned."""
AS_LONG = {"enumerate", "list", "tuple", "sorted", "reversed", "set", "dict", "frozenset", "iter"}
"""Functions whose result is empty only if their first argument is."""
AS_LONG_AS_ALL = {"zip", "product", "chain"}
"""Functions whose result is not empty if no argument is."""
VIEWS = {"items", "values", "keys"}
ASSERTING = ("assert", "check")
"""Names of functions that assert begin so, where another file or an object has them."""
FAILING = {"raises", "warns", "fail"}
"""pytest's own assertions."""

Comprehension = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
Names = Mapping[str, ast.expr]


class Reached(IntEnum):
    """How surely an assertion is reached."""

    NONE = 0
    """There is none."""
    MAYBE = 1
    """There is one, which an empty loop or a condition skips."""
    ALWAYS = 2


@dataclass(frozen=True)
class Scope:
    """Functions of a file, and what its names are where a statement stands."""

    functions: Mapping[str, ast.FunctionDef]
    constants: Names
    local: Names = field(default_factory=dict)
    read: frozenset[str] = frozenset()
    """Functions that are being read: one that calls itself adds nothing."""

    @classmethod
    def of(cls, tree: ast.Module) -> Scope:
        functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        return cls(functions, dict(_assigned(tree.body)))

    def value_of(self, name: str) -> ast.expr | None:
        return self.local.get(name, self.constants.get(name))


def reached_by_tests(source: str) -> dict[str, Reached]:
    """Each test of a file, by name: how surely it asserts something."""
    scope = Scope.of(ast.parse(source))
    return {name: of_body(node.body, scope) for name, node in scope.functions.items() if name.startswith("test_")}


def of_body(body: Iterable[ast.stmt], scope: Scope) -> Reached:
    """How surely one of the statements asserts."""
    most = Reached.NONE
    for node in body:
        most = max(most, of_statement(node, scope))
        scope = replace(scope, local={**scope.local, **dict(_assigned([node]))})
    return most


def of_statement(node: ast.stmt, scope: Scope) -> Reached:
    """How surely a statement asserts, alone or in what it holds."""
    match node:
        case ast.Assert():
            return Reached.MAYBE if _is_all_of_maybe_nothing(node.test, scope) else Reached.ALWAYS
        case ast.FunctionDef() | ast.ClassDef():
            return Reached.NONE  # where it is called
        case ast.For():
            inside = of_body(node.body, scope)
            return max(inside if holds(node.iter, scope) else _maybe(inside), of_expression(node.iter, scope))
        case ast.While():
            return _maybe(of_body(node.body, scope))
        case ast.If():
            taken, other = of_body(node.body, scope), of_body(node.orelse, scope)
            surely = max if _is_about_rank(node.test) else min  # one of the ranks takes each branch
            return max(surely(taken, other), _maybe(max(taken, other)), of_expression(node.test, scope))
        case ast.With():
            managers = max(of_expression(item.context_expr, scope) for item in node.items)
            return max(managers, of_body(node.body, scope))
        case ast.Try():
            handled = max((of_body(handler.body, scope) for handler in node.handlers), default=Reached.NONE)
            tried = of_body([*node.body, *node.orelse], scope)
            return max(tried, _maybe(handled), of_body(node.finalbody, scope))
        case ast.Match():
            return _maybe(max(of_body(case.body, scope) for case in node.cases))
    return of_expression(node, scope)


def of_expression(node: ast.AST, scope: Scope) -> Reached:
    """How surely a function asserts that an expression calls, or passes on to be called."""
    match node:
        case ast.Lambda():
            return Reached.NONE
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            inside = max(_of_parts(node, scope), key=int)
            return inside if holds(node, scope) else _maybe(inside)
        case ast.IfExp() | ast.BoolOp():
            return _maybe(max(_of_parts(node, scope)))
        case ast.Call():
            name, is_attribute = _name(node.func), isinstance(node.func, ast.Attribute)
            if (is_attribute and name in FAILING) or name == SOME:
                return Reached.ALWAYS
            if (is_attribute or name not in scope.functions) and name.lstrip("_").startswith(ASSERTING):
                return Reached.ALWAYS
            named = (each.id for each in (node.func, *node.args) if isinstance(each, ast.Name))
            return max([*_of_parts(node, scope), *(_of_function(each, scope) for each in named)])
    return max(_of_parts(node, scope), default=Reached.NONE)


def _of_parts(node: ast.AST, scope: Scope) -> Iterator[Reached]:
    return (of_expression(each, scope) for each in ast.iter_child_nodes(node))


def _of_function(name: str, scope: Scope) -> Reached:
    if name not in scope.functions or name in scope.read:
        return Reached.NONE
    return of_body(scope.functions[name].body, replace(scope, local={}, read=scope.read | {name}))


def _maybe(found: Reached) -> Reached:
    return min(found, Reached.MAYBE)


def _is_all_of_maybe_nothing(test: ast.expr, scope: Scope) -> bool:
    """True for `all(... for each in values)`, which holds where there is no value."""
    if not isinstance(test, ast.Call) or not isinstance(test.func, ast.Name) or test.func.id != "all":
        return False
    values = test.args[0]
    sources = [each.iter for each in values.generators] if isinstance(values, Comprehension) else [values]
    return not all(holds(each, scope) for each in sources)


def _is_about_rank(test: ast.expr) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "rank" for each in ast.walk(test))


def holds(values: ast.expr, scope: Scope) -> bool:
    """True if the source shows that an iterable is not empty."""
    match values:
        case ast.List() | ast.Tuple() | ast.Set():
            return any(not isinstance(each, ast.Starred) or holds(each.value, scope) for each in values.elts)
        case ast.Dict():
            return any(key is not None for key in values.keys)
        case ast.Constant():
            return isinstance(values.value, str) and bool(values.value)
        case ast.Name():
            known = scope.value_of(values.id)
            others = {name: value for name, value in scope.local.items() if name != values.id}
            return known is not None and holds(known, replace(scope, local=others))
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            return all(holds(each.iter, scope) and not each.ifs for each in values.generators)
        case ast.BinOp(op=ast.Add() | ast.BitOr()):
            return holds(values.left, scope) or holds(values.right, scope)
        case ast.BinOp(op=ast.Mult(), right=ast.Constant(value=int(times))):
            return times > 0 and holds(values.left, scope)
        case ast.IfExp():
            return holds(values.body, scope) and holds(values.orelse, scope)
        case ast.Call():
            return _call_holds(values, scope)
    return False


def _call_holds(call: ast.Call, scope: Scope) -> bool:
    name = _name(call.func)
    if name in VIEWS and isinstance(call.func, ast.Attribute):
        return holds(call.func.value, scope)
    if name == "range":
        return _numbers(call.args, scope)
    if name in AS_LONG:
        return bool(call.args) and holds(call.args[0], scope)
    if name in AS_LONG_AS_ALL:
        # zip raises where its arguments differ in length
        is_strict = any(word.arg == "strict" and ast.unparse(word.value) == "True" for word in call.keywords)
        enough = any if is_strict else all
        return bool(call.args) and enough(
            not isinstance(each, ast.Starred) and holds(each, scope) for each in call.args
        )
    return name in HOLD


def _numbers(arguments: Iterable[ast.expr], scope: Scope) -> bool:
    """True if `range` of these holds something."""
    known = [scope.value_of(each.id) or each if isinstance(each, ast.Name) else each for each in arguments]
    try:
        return bool(range(*(ast.literal_eval(each) for each in known)))
    except ValueError:
        return False


def _name(function: ast.expr) -> str:
    match function:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def _assigned(body: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    """Names that statements assign, with what they assign; no name that is assigned to itself."""
    for node in body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                pairs = [(name, value)]
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                both = zip(names, values, strict=False)
                pairs = [(each.id, value) for each, value in both if isinstance(each, ast.Name)]
            case _:
                continue
        for name, value in pairs:
            if not any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(value)):
                yield name, value
