import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from penstock.config.extras import DISTRIBUTION
from tests.support.run.forked_process import ForkedProcess

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("actor", "broker", "gateway", "launch", "learner", "penstock", "workloads")


def loaded_by(statement: str, output: Path, *, with_torch: bool) -> set[str]:
    """Top-level modules in a process of its own after `statement`. with_torch: they may be loaded before."""
    code = (
        f"import json, sys\n{statement}\nprint(json.dumps(sorted({{m.split('.')[0] for m in sys.modules}})))"
    )
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
        ("import launch.cli.app", {"torch", "numpy", "grpc", "redis", "matplotlib", "gymnasium"}),
        ("import broker.service.process", {"torch", "gymnasium", "safetensors", "learner", "actor"}),
        ("import actor.process", {"redis", "hiredis", "broker", "learner"}),
        ("import actor.rollout.worker", {"torch", "gymnasium", "redis", "hiredis", "broker", "learner"}),
        ("import tests.support.fleet.crowd_actor", {"torch", "gymnasium", "redis", "broker", "learner"}),
        ("import learner.process.entry", {"actor"}),
        ("import penstock.runtime.lifecycle, penstock.rpc.server", {"torch", "redis"}),
    ],
)
def test_a_process_loads_no_more_than_its_role_needs(
    statement: str, absent: set[str], tmp_path: Path
) -> None:
    loaded = loaded_by(statement, tmp_path / "loaded.json", with_torch="torch" not in absent)
    assert loaded & absent == set()


def test_no_installed_distribution_owns_a_name_of_ours() -> None:
    owners = packages_distributions()
    for package in PACKAGES:
        assert set(owners.get(package, [DISTRIBUTION])) == {DISTRIBUTION}, package


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


@pytest.mark.parametrize("room", PACKAGES)
def test_a_file_name_says_one_thing_in_a_room(room: str) -> None:
    files: dict[str, list[str]] = {}
    for path in sorted((ROOT / room).rglob("*.py")):
        if path.name not in {"__init__.py", "__main__.py"}:
            files.setdefault(path.name, []).append(str(path.relative_to(ROOT)))
    assert [places for places in files.values() if len(places) > 1] == []
