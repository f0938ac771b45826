"""The workflows: valid by the schema, with commands and files that are there, and few rights."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.deploy.dockerfiles import NAMES
from tests.deploy.manifests import KUBERNETES, ROOT

FILES: Final = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS: Final = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def content(name: str) -> dict[Any, Any]:
    """A workflow; YAML takes its key `on` for a truth value."""
    return dict(yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text()))


def commands(file: Path) -> list[str]:
    jobs = yaml.safe_load(file.read_text())["jobs"].values()
    return [step["run"] for job in jobs for step in job.get("steps", ()) if "run" in step]


def test_they_are_valid_by_the_schema() -> None:
    words = ["-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *map(str, FILES)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_lint_test_build_and_both_deployments_follow_one_another() -> None:
    checks, deploy = content("checks")["jobs"], content("deploy")["jobs"]
    assert checks["build"]["needs"] == ["lint", "test"]
    assert "workflow_call" in content("checks")[True]
    assert (deploy["checks"]["uses"], deploy["images"]["needs"]) == (
        "./.github/workflows/checks.yml",
        "checks",
    )
    assert checks["test"]["strategy"]["matrix"]["tier"] == ["test", "test-processes", "test-systems"]
    assert (deploy["staging"]["needs"], deploy["production"]["needs"]) == ("images", "staging")
    assert [deploy[name]["with"]["environment"] for name in ("staging", "production")] == [
        "staging",
        "production",
    ]


def test_what_tests_start_is_installed_where_there_are_packages_of_it() -> None:
    job = content("checks")["jobs"]["test"]
    assert job["container"]["image"] == "python:3.11-bookworm"
    (install,) = [step["run"] for step in job["steps"] if "apt-get install" in step.get("run", "")]
    started = {"redis-server", "postgresql", "prometheus", "chromium", "kubernetes-client", "nodejs"}
    assert started <= set(install.split())


def test_every_image_is_built() -> None:
    assert content("images")["jobs"]["image"]["strategy"]["matrix"]["name"] == NAMES


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_is_called_is_there(file: Path) -> None:
    text = file.read_text()
    called = set(re.findall(r"make ([a-z-]+)", "\n".join(commands(file))))
    assert called <= TARGETS
    for folder in re.findall(r"deploy/kubernetes/(overlays/\w+)", text):
        assert (KUBERNETES / folder / "kustomization.yaml").exists(), folder
    for other in re.findall(r"uses: (\./\S+)", text):
        assert (ROOT / other).exists(), other


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_they_may_read_and_nothing_else(file: Path) -> None:
    assert yaml.safe_load(file.read_text())["permissions"] == {"contents": "read"}
    for command in commands(file):
        assert not re.search(r"\$\{\{ *(secrets|github\.(event|head_ref)|inputs|vars)", command), command


def test_the_rollout_names_the_image_of_the_gateway(tmp_path: Path) -> None:
    (command,) = [one for one in commands(ROOT / ".github/workflows/rollout.yml") if "sed" in one]
    (tmp_path / "kustomization.yaml").write_bytes(
        (KUBERNETES / "overlays" / "gateway" / "kustomization.yaml").read_bytes()
    )
    environment = {"IMAGES": "images.example/team", "TAG": "v9.9.9", "PATH": "/usr/bin:/bin"}
    subprocess.run(["bash", "-ec", command], cwd=tmp_path, env=environment, check=True)
    images = yaml.safe_load((tmp_path / "kustomization.yaml").read_text())["images"]
    assert {
        "name": "penstock-gateway",
        "newName": "images.example/team/penstock-gateway",
        "newTag": "v9.9.9",
    } in images
