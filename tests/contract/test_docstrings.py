"""What a room offers to others is described in sentences.

A docstring of a function begins with a verb, that of a class or a property with a subject or a verb. It names
the errors that are raised, and the shape or the dtype of arrays and tensors. Held here is what a parser can
see of that: none begins as a relative clause or points elsewhere, each error that a body raises is named, and
where an annotation names an array there is a shape, a dtype, or a word for one.
"""

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
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
ARRAY: Final = re.compile(r"\b(Tensor|Array|NDArray|Reals)\b")
SHAPE: Final = re.compile(r"\[[^\]]+\]|\b(shapes?|dtypes?|scalars?|float32|float64|int64|uint8|bool)\b")
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@cache
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


def folder_of(module: str) -> str:
    """The folder of a module, which is a room or a sub-room."""
    return module.rpartition(".")[0]


def offered(modules: dict[str, ast.Module], where: Callable[[str], str] = room_of) -> set[tuple[str, str]]:
    """Module and name of all that another room imports, or what `where` tells apart."""
    found = set()
    for module, tree in modules.items():
        for node in imports(tree.body):
            source = node.module or ""
            for name in (alias.name for alias in node.names):
                if where(source) != where(module):
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


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a definition but those of definitions inside it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Definition | ast.Lambda):
            yield child
            yield from own_nodes(child)


def raised(node: ast.AST) -> set[str]:
    """The names of the errors that a body raises itself, by their class."""
    errors = [one.exc for one in own_nodes(node) if isinstance(one, ast.Raise) and one.exc is not None]
    called = [error.func if isinstance(error, ast.Call) else error for error in errors]
    names = [ast.unparse(error).rpartition(".")[2] for error in called]
    return {name for name in names if name[0].isupper()}


def imported_functions() -> Iterator[tuple[str, str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield place, text and definition of every function and method that another folder imports.

    The text is the docstring of the function with that of its class. `__init__` is among the methods.
    """
    modules = sources()
    wanted = offered(modules, folder_of)
    for module, tree in modules.items():
        for top in (node for node in tree.body if isinstance(node, Definition)):
            if (module, top.name) not in wanted:
                continue
            members = top.body if isinstance(top, ast.ClassDef) else [top]
            around = ast.get_docstring(top) or ""
            for node in members:
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    continue
                if node.name == "__init__" or not node.name.startswith("_"):
                    place = f"{module.replace('.', '/')}.py:{node.lineno} {node.name}"
                    yield place, f"{around} {ast.get_docstring(node)}", node


def test_errors_that_imported_functions_raise_are_named() -> None:
    """By the docstring of the function or of its class, where the body itself raises them."""
    wrong, seen = [], 0
    for place, text, node in imported_functions():
        errors = raised(node)
        seen += len(errors)
        if lacking := sorted(error for error in errors if not re.search(rf"\b{error}\b", text)):
            wrong.append(f"{place}: say that it raises {', '.join(lacking)}")
    assert seen > 200
    assert wrong == []


def test_arrays_of_imported_functions_have_a_shape_or_a_dtype() -> None:
    """In the docstring of the function or of its class."""
    wrong, seen = [], 0
    for place, text, node in imported_functions():
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        annotations = [one.annotation for one in arguments] + [node.returns]
        if any(ARRAY.search(ast.unparse(one)) for one in annotations if one is not None):
            seen += 1
            if not SHAPE.search(text):
                wrong.append(f"{place}: say the shape or the dtype of its arrays")
    assert seen > 200
    assert wrong == []
