"""The overlays as `kubectl` renders them: objects, workloads, containers, and whether commands are known."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import typer
import yaml

from penstock.config.settings import from_environment, load
from penstock.launch.cli.app import app

ROOT: Final = Path(__file__).resolve().parents[2]
KUBERNETES: Final = ROOT / "deploy" / "kubernetes"
OVERLAYS: Final = ("local", "gpu", "plain", "production")
COMPONENT: Final = "app.kubernetes.io/component"

Object = dict[str, Any]
needs_kubectl: Final = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="no kubectl on PATH (Debian: kubernetes-client)"
)


@cache
def render(folder: Path) -> tuple[Object, ...]:
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def overlay(name: str) -> tuple[Object, ...]:
    return render(KUBERNETES / "overlays" / name)


def with_components(folder: Path, *names: str, base: str = "local", namespace: str = "") -> Path:
    """An overlay with some components, as an overlay of one's own; "": it names no namespace."""
    folder.mkdir()
    here = Path("../" * (len(folder.resolve().parts) - 1)) / KUBERNETES.relative_to("/")
    components = [str(here / "components" / name) for name in names]
    (folder / "kustomization.yaml").write_text(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
        f"resources: [{here / 'overlays' / base}]\ncomponents: {json.dumps(components)}\n"
        + (f"namespace: {namespace}\n" if namespace else "")
    )
    return folder


def of_page(folder: Path, page: str) -> Path:
    """The last kustomization that a page of docs shows, with the way to this repository."""
    folder.mkdir()
    blocks = re.findall(
        r"```yaml\n# kustomization.yaml\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL
    )
    here = "../" * (len(folder.resolve().parts) - 1) + str(ROOT.relative_to("/"))
    (folder / "kustomization.yaml").write_text(blocks[-1].replace("penstock/deploy/", f"{here}/deploy/"))
    (folder / "run.toml").write_text('run = "mine"\n')
    return folder


def kinds(objects: tuple[Object, ...], *names: str) -> list[Object]:
    return [one for one in objects if one["kind"] in names]


def name_of(one: Object) -> str:
    return f"{one['kind']}/{one['metadata']['name']}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    kind: str
    name: str
    replicas: int
    template: Object
    claims: tuple[Object, ...] = ()
    service: str = ""
    """By which each pod of a StatefulSet has a name of its own."""

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.template["metadata"]["labels"])

    @property
    def spec(self) -> Object:
        return dict(self.template["spec"])

    @property
    def serves(self) -> bool:
        return self.kind != "Job"

    def containers(self) -> Iterator[tuple[str, Object]]:
        for key in ("initContainers", "containers"):
            for container in self.spec.get(key, ()):
                yield f"{self.kind}/{self.name}/{container['name']}", container


def workloads(objects: tuple[Object, ...]) -> list[Workload]:
    return [
        Workload(
            kind=one["kind"],
            name=one["metadata"]["name"],
            replicas=one["spec"].get("replicas", 1),
            template=one["spec"]["template"],
            claims=tuple(one["spec"].get("volumeClaimTemplates", ())),
            service=one["spec"].get("serviceName", ""),
        )
        for one in kinds(objects, "Deployment", "StatefulSet", "Job")
    ]


def all_containers(objects: tuple[Object, ...]) -> list[tuple[str, Object]]:
    return [pair for workload in workloads(objects) for pair in workload.containers()]


def selects(selector: Object, labels: dict[str, str]) -> bool:
    """Whether a label selector holds for labels; an operator that no manifest here uses is an error."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for rule in selector.get("matchExpressions", ()):
        assert rule["operator"] == "In", rule
        if labels.get(rule["key"]) not in rule["values"]:
            return False
    return True


def parsed(words: list[str]) -> Any:
    """The context of a command line; raises click.UsageError for an unknown or missing option."""
    command: Any = typer.main.get_command(app)
    arguments = list(words)
    while arguments and not arguments[0].startswith("-") and hasattr(command, "get_command"):
        name = arguments.pop(0)
        command = command.get_command(command.make_context(name, [], resilient_parsing=True), name)
        assert command is not None, f"{name} is no command"
    return command.make_context(command.name, arguments)


def check_command(container: Object) -> Any:
    """The context of a container's command; raises also for a setting that does not exist."""
    load(
        [from_environment({one["name"]: one.get("value", "of a secret") for one in container.get("env", ())})]
    )
    return parsed([*container["command"][1:], *container.get("args", ())])
