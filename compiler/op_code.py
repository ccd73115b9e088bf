"""The code of ops from outside loadplan: it decides what a plan moves where, so it counts in the plan's key.

A recipe's own digest has the source of each op's class. What its methods use beyond that, in the same module, is found
here by name, from definition to definition; what else the module holds (other recipes, tables, comments) does not count.
Other modules that it imports are not followed, only named.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

from loadplan.cache.digest import digest_bytes, digest_json
from loadplan.compiler.recipe import Recipe

_COUNTED = ("loadplan.compiler.", "loadplan.runtime.")  # their source is in every key


def op_code_digest(recipe: Recipe) -> str:
    """SHA-256 (hex) of all that the recipe's ops from outside loadplan are made of; empty without such ops."""
    kinds = {(k.__module__, k.__name__) for k in _classes(recipe) if not k.__module__.startswith(_COUNTED)}
    if not kinds:
        return ""
    codes: list[list[str]] = []
    for module, name in kinds:
        file = getattr(sys.modules.get(module), "__file__", None)
        codes.append(
            [
                name,
                digest_bytes("\n".join(used_code(Path(file).read_text(encoding="utf-8"), name)).encode())
                if file
                else "",
            ]
        )
    return digest_json(sorted(codes))


def used_code(source: str, name: str) -> list[str]:
    """The top-level statements of a module that the definition of `name` rests on, without comments, in their order."""
    tree = ast.parse(source)
    found: set[int] = {i for i, node in enumerate(tree.body) if not isinstance(node, _NAMED) and not _is_text(node)}
    wanted, seen = {name} | {n for i in found for n in _names(tree.body[i])}, set[str]()
    while fresh := wanted - seen:
        seen |= fresh
        for i, node in enumerate(tree.body):
            if i not in found and fresh & set(_defines(node)):
                found.add(i)
                wanted |= set(_names(node))
    return [ast.dump(tree.body[i]) for i in sorted(found)]


_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign, ast.Import, ast.ImportFrom)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _defines(node: ast.stmt) -> Iterator[str]:
    """The names that a statement binds; `*` stands for any."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in aliases)
        case _:
            yield from (n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


def _names(node: ast.AST) -> Iterator[str]:
    """The names that a statement uses, `*` among them for an import of everything."""
    yield "*"
    yield from (n.id for n in ast.walk(node) if isinstance(n, ast.Name))


def _classes(value: object) -> Iterator[type]:
    """The classes of all dataclass values in `value`."""
    if is_dataclass(value) and not isinstance(value, type):
        yield type(value)
        for field in fields(value):
            yield from _classes(getattr(value, field.name))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _classes(item)
