"""The compose file: valid, and its commands and settings are those that the programs know."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from penstock.config.settings import from_environment, load
from tests.deploy.manifests import ROOT, parsed

FILE: Final = ROOT / "deploy" / "compose.yaml"
COMPOSE: Final[dict[str, Any]] = yaml.safe_load(FILE.read_text())
SERVICES: Final[dict[str, Any]] = COMPOSE["services"]
FOLDERS: Final = ("./prometheus", "./grafana", "./grafana/provisioning")
"""Of deploy, for Prometheus and Grafana."""
PREPARING: Final = ("prepare", "renew")
SECRETS: Final = {
    "redis": {"redis.pem", "redis.key", "authority.pem", "users.acl"},
    "broker": {"broker.pem", "broker.key", "authority.pem", "redis-broker.password"},
    "learner": {"learner.pem", "learner.key", "authority.pem", "redis-learner.password"},
    "actor": {"actor.pem", "actor.key", "authority.pem"},
    "server": {"server.pem", "server.key", "authority.pem"},
}
"""What each role needs and may read."""
OURS: Final = sorted(name for name, one in SERVICES.items() if one["image"].startswith("penstock-"))


def test_the_compose_file_is_valid_by_its_specification() -> None:
    words = ["-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(FILE)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", [name for name in OURS if name not in PREPARING])
def test_commands_and_settings_are_known(name: str) -> None:
    parsed(SERVICES[name]["command"])
    load([from_environment(SERVICES[name]["environment"])])


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_no_service_has_privileges(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service.get("user", "the user of the image") != "0:0" or service["network_mode"] == "none"
    tag = service["image"].rpartition(":")[2]
    assert tag not in (service["image"], "latest")
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_named_files_and_volumes_exist() -> None:
    for configuration in COMPOSE["configs"].values():
        assert (FILE.parent / configuration["file"]).is_file()
    for service in SERVICES.values():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert source in COMPOSE["volumes"] or source in FOLDERS, source
        for build in [service["build"]] if "build" in service else []:
            assert (FILE.parent / build["context"] / build["dockerfile"]).is_file()


def prepare(folder: Path, data: Path) -> None:
    """What the containers `prepare` and `renew` run, here."""
    for name in ("authority", *SECRETS):
        (folder / name).mkdir(parents=True, exist_ok=True)
    given = {
        "SECRETS": str(folder),
        "USERS": str(ROOT / "deploy" / "redis" / "users.acl"),
        "OWNER": f"{os.getuid()}:{os.getgid()}",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["sh", str(FILE.parent / "prepare.sh"), str(data)],
        env=given, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def read(folder: Path) -> dict[str, bytes]:
    return {f"{path.parent.name}/{path.name}": path.read_bytes() for path in folder.glob("*/*")}


def test_each_role_gets_only_its_own_secrets(tmp_path: Path) -> None:
    prepare(tmp_path / "secrets", tmp_path)
    for role, files in SECRETS.items():
        folder = tmp_path / "secrets" / role
        assert {path.name for path in folder.iterdir()} == files
        assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o400}
    for name, service in SERVICES.items():
        volumes = [volume.split(":") for volume in service.get("volumes", ())]
        shown = [source for source, target, *_ in volumes if target.startswith(("/certificates", "/secrets"))]
        role = "actor" if name == "evaluator" else name
        if name not in PREPARING:
            assert shown == ([f"{role}-secrets"] if role in SECRETS else []), name


def test_certificates_are_renewed_before_they_end_and_passwords_stay(tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    prepare(secrets, tmp_path)
    first = read(secrets)
    prepare(secrets, tmp_path)
    assert read(secrets) == first, "they are young"
    old = time.time() - 62 * 86400
    os.utime(secrets / "authority" / "broker.pem", (old, old))
    prepare(secrets, tmp_path)
    renewed = read(secrets)
    changed = {name for name, data in renewed.items() if data != first[name]}
    roles = {f"{role}/{role}.{kind}" for role in SECRETS for kind in ("pem", "key")}
    assert roles <= changed
    assert not {name for name in changed if name.endswith((".password", "users.acl", "authority.pem"))}


def test_only_brokers_and_the_learner_reach_redis() -> None:
    on_redis = {name for name, one in SERVICES.items() if "redis" in one.get("networks", ())}
    assert on_redis == {"redis", "broker", "learner"}
    assert SERVICES["redis"]["networks"] == ["redis"]
    assert COMPOSE["networks"]["redis"]["internal"]
    assert all("networks" in one for name, one in SERVICES.items() if name not in PREPARING)
