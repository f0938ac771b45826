"""What a room offers to others is described in sentences.

A docstring of a function begins with a verb, that of a class or a property with a subject or a verb. Held
here is what a parser can see of it: none begins as a relative clause or points elsewhere.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = ("actor", "broker", "gateway", "launch", "learner", "penstock", "workloads")
HALVES: Final = ("broker", "penstock")
"""Packages whose sub-packages are rooms."""
CLAUSE: Final = re.compile(
    r"(What|Whether|Where|When|Who|Whose|How|Which|Whatever|Of|As|By|That|Nobody|None|Nothing|See)\b"
)
NOUN: Final = re.compile(r"(A|An|The|All|Each|Every|Most|One|Their|Its|These|Those)\b")
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def sources() -> dict[str, ast.Module]:
    """Every module of the rooms by its name, generated stubs left out."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text())
        for path in paths
        if "v1" not in path.parts
    }


def room_of(module: str) -> str:
    """The room of a module: its package, in the halves with the sub-package."""
    first, *rest = module.split(".")
    return f"{first}.{rest[0]}" if first in HALVES and rest else first


def imports(body: Sequence[ast.AST]) -> Iterator[ast.ImportFrom]:
    """Every `from ... import` among these statements and those in them; expressions hold none."""
    for node in body:
        if isinstance(node, ast.ImportFrom):
            yield node
        elif isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from imports(list(ast.iter_child_nodes(node)))


def offered(modules: dict[str, ast.Module]) -> set[tuple[str, str]]:
    """Module and name of all that another room imports."""
    found = set()
    for module, tree in modules.items():
        for node in imports(tree.body):
            source = node.module or ""
            for name in (alias.name for alias in node.names):
                if room_of(source) != room_of(module):
                    found.add((source, name))
    return found


def described(name: str, node: Definition) -> Iterator[tuple[str, Definition]]:
    """A definition and, of a class, its public methods."""
    yield name, node
    members = node.body if isinstance(node, ast.ClassDef) else []
    for member in members:
        if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and not member.name.startswith("_"):
            yield f"{name}.{member.name}", member


def is_called(node: Definition) -> bool:
    """Whether it is a function or a method and no property."""
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    return not isinstance(node, ast.ClassDef) and not any(one.endswith("property") for one in decorators)


def test_names_that_other_rooms_import_are_described_in_sentences() -> None:
    """Functions begin with a verb; nothing begins as a relative clause or only points elsewhere."""
    modules = sources()
    wanted = offered(modules)
    seen, wrong = 0, []
    for module, tree in modules.items():
        for top in (node for node in tree.body if isinstance(node, Definition)):
            if (module, top.name) not in wanted:
                continue
            for name, node in described(top.name, top):
                seen += 1
                text = ast.get_docstring(node) or ""
                if not text or CLAUSE.match(text) or (is_called(node) and NOUN.match(text)):
                    wrong.append(
                        f"{module.replace('.', '/')}.py:{node.lineno} {name}: {text.splitlines()[:1]}"
                    )
    assert seen > 500
    assert wrong == []
