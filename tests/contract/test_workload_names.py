"""The core and the launcher find workloads by entry point and name none in their text."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ("actor", "broker", "learner", "penstock")
NOT_CORE = ("penstock/recipes/", "penstock/workloads/")
TEXT = {".py", ".lua", ".toml", ".html", ".js", ".css"}
NAMED = re.compile(
    r"\brlhf\b|[\"']goals[\"']|\bworkloads\.(?!plugin\b)[a-z_]+|\bfrom penstock.workloads\b"
    r"|\bworkload\b.*\"control\""
)
TORCH_FREE = (
    "penstock.workloads.chat",
    "penstock.workloads.chat.commands",
    "penstock.workloads.chat.ratings",
    "penstock.workloads.chat.tasks",
    "penstock.workloads.control",
    "penstock.workloads.goals",
    "penstock.workloads.goals.commands",
    "penstock.workloads.goals.log_evaluation",
    "penstock.workloads.goals.injector",
    "penstock.workloads.prompts",
    "penstock.workloads.prompts.embeddings",
    "penstock.workloads.prompts.features",
    "penstock.workloads.prompts.tasks",
    "penstock.workloads.rlhf",
    "penstock.workloads.plugin.fragments",
    "penstock.workloads.rlhf.commands",
    "penstock.workloads.thoughts",
    "penstock.workloads.thoughts.thought_commands",
    "penstock.workloads.thoughts.tasks",
    "penstock.workloads.thoughts.environment",
    "penstock.workloads.thoughts.environment",
)


@pytest.mark.parametrize("package", CORE)
def test_no_module_of_the_core_names_a_workload(package: str) -> None:
    sources = [
        path
        for path in (ROOT / package).rglob("*")
        if path.suffix in TEXT
        and not {"v1", "vendor"} & set(path.parts)
        and not str(path.relative_to(ROOT)).startswith(NOT_CORE)
    ]
    assert sources
    named = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sources
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if NAMED.search(line)
    ]
    assert named == []


@pytest.mark.parametrize(
    "module",
    sorted((ROOT / "penstock" / "workloads" / "plugin").glob("[a-z]*.py")),
    ids=lambda module: module.stem,
)
def test_every_module_of_the_surface_is_described(module: Path) -> None:
    tutorial = (ROOT / "docs" / "tutorials" / "add-a-workload.md").read_text()
    assert f"`penstock.workloads.plugin.{module.stem}`" in tutorial
    tree = ast.parse(module.read_text())
    [offered] = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    described = ast.get_docstring(tree) or ""
    assert [name for name in offered if not re.search(rf"\b{name}\b", described)] == []


def test_records_commands_and_fragments_load_no_torch() -> None:
    code = (
        f"import importlib, sys\nfor name in {TORCH_FREE}:\n    importlib.import_module(name)\n"
        "    print(name, [heavy for heavy in ('torch', 'transformers') if heavy in sys.modules])"
    )
    reply = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert reply.stdout.splitlines() == [f"{name} []" for name in TORCH_FREE]
