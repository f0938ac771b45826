"""The compose file: valid, and its commands and settings are those that the programs know."""

import subprocess
import sys
from typing import Any, Final

import pytest
import yaml

from tests.deploy import command_line
from tests.deploy.manifests import ROOT

FILE: Final = ROOT / "deploy" / "compose.yaml"
COMPOSE: Final[dict[str, Any]] = yaml.safe_load(FILE.read_text())
SERVICES: Final[dict[str, Any]] = COMPOSE["services"]
FOLDERS: Final = ("./prometheus", "./grafana", "./grafana/provisioning")
"""Of deploy, for Prometheus and Grafana."""
OURS: Final = sorted(name for name, one in SERVICES.items() if one["image"].startswith("penstock-"))


def test_it_is_valid_by_the_specification() -> None:
    """Checked offline, with the schema that check-jsonschema carries."""
    words = ["-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(FILE)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_has_everybody() -> None:
    """Two actors; nobody is forgotten."""
    everybody = {
        "prepare",
        "redis",
        "broker",
        "learner",
        "actor",
        "evaluator",
        "server",
        "prometheus",
        "grafana",
    }
    assert SERVICES.keys() == everybody
    assert SERVICES["actor"]["deploy"]["replicas"] == 2


@pytest.mark.parametrize("name", [name for name in OURS if name != "prepare"])
def test_commands_and_settings_are_known(name: str) -> None:
    """The command line takes the words, the configuration the variables."""
    command_line.check(SERVICES[name]["command"], SERVICES[name]["environment"])


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_nobody_has_privileges(name: str) -> None:
    """What prepares the volumes is root of its container, may change owners, and has no network."""
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service.get("user", "nobody of the image") != "0:0" or service["network_mode"] == "none"
    tag = service["image"].rpartition(":")[2]
    assert tag not in (service["image"], "latest")
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_files_and_volumes_that_are_named_are_there() -> None:
    """Relative to the file."""
    for configuration in COMPOSE["configs"].values():
        assert (FILE.parent / configuration["file"]).is_file()
    for service in SERVICES.values():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert source in COMPOSE["volumes"] or source in FOLDERS, source
        for build in [service["build"]] if "build" in service else []:
            assert (FILE.parent / build["context"] / build["dockerfile"]).is_file()
