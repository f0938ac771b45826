import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINTER: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
CONTRACTS: dict[str, dict[str, Any]] = {contract["name"]: contract for contract in LINTER["contracts"]}


def violation(contract: dict[str, Any]) -> tuple[str, str]:
    """A module and what it must not import, by the contract's own words."""
    container = f"{contract['containers'][0]}." if contract.get("containers") else ""
    match contract["type"]:
        case "forbidden":
            return contract["source_modules"][0], contract["forbidden_modules"][0]
        case "layers":
            highest, lowest = (contract["layers"][at].split("|")[0].strip(" ()") for at in (0, -1))
            return f"{container}{lowest}", f"{container}{highest}"
        case "independence":
            first, second, *_ = contract["modules"]
            return first, second
        case "protected":
            protected = contract["protected_modules"][0]
            return protected.split(".")[0], protected
        case other:
            pytest.fail(f"a contract of type {other!r}: say here how it is broken")


@pytest.mark.parametrize("name", CONTRACTS)
def test_a_contract_can_be_broken_here(name: str) -> None:
    source, forbidden = violation(CONTRACTS[name])
    assert _path(source).exists()
    assert forbidden.split(".")[0] not in LINTER["root_packages"] or _path(forbidden).exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTRACTS)
def test_a_contract_fails_when_it_is_broken(name: str, tmp_path: Path) -> None:
    for package in LINTER["root_packages"]:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    source, forbidden = violation(CONTRACTS[name])
    path = tmp_path / _path(source).relative_to(ROOT)
    path.write_text(f"{path.read_text()}\nimport {forbidden}\n")
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [lint, "--no-cache"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240
    )
    assert f"{name} BROKEN" in done.stdout


def _path(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
