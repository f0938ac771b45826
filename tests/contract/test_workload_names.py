"""The core and the launcher find workloads by entry point and name none in their text."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ("penstock", "broker", "actor", "learner", "launch")
NAMED = re.compile(
    r"\brlhf\b|\bworkloads\.(?!plugin\b)[a-z_]+|\bfrom workloads\b|\bimport workloads\b"
    r"|\bworkload\b.*\"control\""
)
TORCH_FREE = (
    "workloads.control",
    "workloads.goals",
    "workloads.goals.commands.trace_commands",
    "workloads.goals.commands.trace_evaluation",
    "workloads.goals.injector.gate",
    "workloads.rlhf",
    "workloads.plugin.fragments",
    "workloads.rlhf.commands.generate",
    "workloads.rlhf.commands.reward_commands",
)


@pytest.mark.parametrize("package", CORE)
def test_no_module_of_the_core_names_a_workload(package: str) -> None:
    """Neither imported nor in a string, a comment or a docstring; generated stubs left out."""
    sources = [path for path in (ROOT / package).rglob("*.py") if "v1" not in path.parts]
    assert sources
    named = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sources
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if NAMED.search(line)
    ]
    assert named == []


@pytest.mark.parametrize("module", TORCH_FREE)
def test_records_commands_and_fragments_load_no_torch(module: str) -> None:
    """They are read where torch is not installed, or where help is to be fast."""
    heavy = ("torch", "transformers")
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    reply = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert reply.stdout == "[]\n"
