import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from penstock.config.configuration_error import DISTRIBUTION
from tests.support.run.forked_process import ForkedProcess

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("actor", "broker", "learner", "penstock")
BARE = {"actor", "broker", "gateway", "launch", "learner", "recipes", "workloads"}
"""Names that a user's own modules may have: imported so, a module of ours would be a second copy."""


def loaded_by(statement: str, output: Path, *, with_torch: bool) -> set[str]:
    """Modules in a process of its own after `statement`. with_torch: they may be loaded before."""
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    if with_torch:
        assert ForkedProcess(code, output=output).wait(60) == 0, output.read_text()
        return set(json.loads(output.read_text().splitlines()[-1]))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_imports_run_one_way() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import penstock", {"torch", "numpy", "grpc", "redis"}),
        ("import penstock.launch.cli.app", {"torch", "numpy", "grpc", "redis", "matplotlib", "gymnasium"}),
        (
            "import penstock.broker.service.process",
            {"torch", "gymnasium", "safetensors", "penstock.learner", "penstock.actor"},
        ),
        ("import penstock.actor.process", {"redis", "hiredis", "penstock.broker", "penstock.learner"}),
        (
            "import penstock.actor.rollout.loop",
            {"torch", "gymnasium", "redis", "hiredis", "penstock.broker", "penstock.learner"},
        ),
        (
            "import tests.support.fleet.crowd_actor",
            {"torch", "redis", "penstock.broker", "penstock.learner"},
        ),
        ("import penstock.learner.entry", {"penstock.actor"}),
        ("import penstock.runtime.lifecycle, penstock.runtime.server_frame", {"torch", "redis"}),
    ],
)
def test_a_process_loads_no_more_than_its_role_needs(
    statement: str, absent: set[str], tmp_path: Path
) -> None:
    loaded = loaded_by(statement, tmp_path / "loaded.json", with_torch="torch" not in absent)
    assert loaded & (absent | BARE) == set()


def test_penstock_is_the_only_name_that_the_distribution_owns() -> None:
    owners = packages_distributions()
    assert set(owners["penstock"]) == {DISTRIBUTION}
    owned = {name for name, names in owners.items() if DISTRIBUTION in names}
    assert {name for name in owned if not name.startswith("__editable__")} == {"penstock"}


def third_party_imports() -> set[str]:
    """Top-level names that the source imports and that are neither ours nor the standard library's."""
    statement = re.compile(r"^\s*(?:from|import) (\w+)", re.MULTILINE)
    names = {
        name
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for name in statement.findall(re.sub(r'"""(.|\n)*?"""', "", path.read_text()))
    }
    return names - set(PACKAGES) - sys.stdlib_module_names


def test_every_import_is_a_declared_dependency_and_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {
        re.split(r"[\s\[<>=;]", requirement)[0].lower()
        for requirement in sum(project["optional-dependencies"].values(), project["dependencies"])
    }
    pinned = {
        line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    owners = packages_distributions()
    for name in third_party_imports() - {"google"}:
        distributions = {owner.lower().replace("_", "-") for owner in owners.get(name, [name])}
        assert distributions & declared, f"{name} is imported but not declared"
        assert distributions & pinned, f"{name} is not pinned in constraints.txt"


@pytest.mark.promise("nothing-unpickled")
def test_nothing_unsafe_is_called() -> None:
    unsafe = re.compile(
        r"\bimport (?:pickle|cloudpickle|dill|marshal)\b|\btorch\.load\(|(?<![\w.])eval\(|\bexec\("
    )
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for match in unsafe.finditer(path.read_text())
    ]
    assert found == []
