"""A cluster on the disk: a `kubectl` that keeps Jobs as files, and runs their pods as processes here.

It stands for Kubernetes where there is none. It knows what the gateway asks of it, and answers in the words
of `kubectl`. Objects must be valid by Kubernetes' own schemas. A test has it say what a real cluster would
have to come to first:

    FOLDER/away              the cluster does not answer
    FOLDER/forbidden         it refuses to make anything
    FOLDER/podless           Jobs get no pod
    FOLDER/NAME.told.json    {"pods": [status, ...], "conditions": [...]}, over what is true

    FOLDER/created           a line for each Job that was made
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[3]
VARIABLE: Final = "DISK_CLUSTER"


class DiskCluster:
    """A cluster below a folder, for tests. bin: goes in front of PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder / "cluster", folder / "bin"
        self.folder.mkdir()
        self.bin.mkdir()
        program = self.bin / "kubectl"
        program.write_text(
            f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
            "from tests.support.gateway.disk_cluster import main\nsys.exit(main(sys.argv[1:]))\n"
        )
        program.chmod(0o755)

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs that shall meet this cluster; `python` is that of the tests."""
        own = os.pathsep.join((str(self.bin), str(Path(sys.executable).parent), os.environ["PATH"]))
        return {"PATH": own, VARIABLE: str(self.folder)}

    def created(self) -> list[str]:
        """The names of all Jobs that were ever made, in order."""
        file = self.folder / "created"
        return file.read_text().split() if file.exists() else []

    def there(self) -> list[str]:
        """The names of the Jobs that there are."""
        return sorted(path.name.removesuffix(".job.json") for path in self.folder.glob("*.job.json"))

    def set(self, name: str, *, on: bool = True) -> None:
        """Have it be `away`, `forbidden` or `podless`, or no more."""
        file = self.folder / name
        file.touch() if on else file.unlink(missing_ok=True)

    def tell(self, name: str, pods: list[dict[str, Any]], conditions: list[dict[str, Any]]) -> None:
        """Have a Job and its pods say this."""
        told = json.dumps({"pods": pods, "conditions": conditions})
        (self.folder / f"{name}.told.json").write_text(told)

    def grow_old(self, name: str, seconds: float) -> None:
        """Make a Job older."""
        file = self.folder / f"{name}.job.json"
        job = json.loads(file.read_text())
        job["metadata"]["creationTimestamp"] = _stamp(datetime.now(UTC) - timedelta(seconds=seconds))
        file.write_text(json.dumps(job))

    def take_away(self, name: str) -> None:
        """Let a Job be gone, as after its time to live."""
        for file in self.folder.glob(f"{name}.*"):
            file.unlink()

    def end(self) -> None:
        """Kill what lives of all pods."""
        for file in self.folder.glob("*.pid"):
            with suppress(ProcessLookupError):
                os.killpg(int(file.read_text()), signal.SIGKILL)


def main(words: list[str]) -> int:
    """Do what `kubectl WORDS` does."""
    folder = Path(os.environ[VARIABLE])
    if (folder / "away").exists():
        return _fail(
            "The connection to the server 10.0.0.1:443 was refused - did you specify the right host?"
        )
    command = [word for word in words if not word.startswith("--")]
    if words[-1:] == ["--run-pod"]:
        return _run_pod(folder, command[0])
    match command:
        case ["create"]:
            return _create(folder, json.load(sys.stdin))
        case ["get", "jobs,pods"]:
            wanted = dict(
                pair.split("=")
                for word in words
                if word.startswith("--selector=")
                for pair in word.removeprefix("--selector=").split(",")
            )
            print(json.dumps({"kind": "List", "items": list(_objects(folder, wanted))}))
            return 0
        case ["delete", name]:
            return _delete(folder, name.removeprefix("job/"))
    return _fail(f"error: unknown command {words}")


def _fail(message: str) -> int:
    sys.stderr.write(f"{message}\n")
    return 1


def _stamp(at: datetime) -> str:
    return at.isoformat(timespec="seconds").replace("+00:00", "Z")


def _create(folder: Path, one: dict[str, Any]) -> int:
    import kubernetes_validate

    name = one["metadata"]["name"]
    if (folder / "forbidden").exists():
        who = "system:serviceaccount:penstock-gateway:gateway"
        said = f'jobs.batch is forbidden: User "{who}" cannot create resource "jobs"'
        return _fail(f'Error from server (Forbidden): error when creating "STDIN": {said}')
    kubernetes_validate.validate(one, "1.30", strict=True)
    one["metadata"]["creationTimestamp"] = _stamp(datetime.now(UTC))
    try:
        with (folder / f"{name}.job.json").open("x") as file:
            json.dump(one, file)
    except FileExistsError:
        said = f'jobs.batch "{name}" already exists'
        return _fail(f'Error from server (AlreadyExists): error when creating "STDIN": {said}')
    with (folder / "created").open("a") as file:
        file.write(f"{name}\n")
    if not (folder / "podless").exists():
        subprocess.Popen(
            [str(Path(sys.argv[0])), name, "--run-pod"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(folder / f"{name}.stderr").open("w"),
            start_new_session=True,
        )
    print(f"job.batch/{name} created")
    return 0


def _run_pod(folder: Path, name: str) -> int:
    """Run the container of a Job's pod, and note its exit code: what a node does."""
    job = json.loads((folder / f"{name}.job.json").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    told = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    child = subprocess.Popen(
        container["command"],
        cwd=container["workingDir"],
        env={**os.environ, **told},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    (folder / f"{name}.pid").write_text(str(child.pid))
    code = child.wait()
    (folder / f"{name}.code").write_text(str(code if code >= 0 else 128 - code))
    return 0


def _objects(folder: Path, wanted: dict[str, str]) -> Iterator[dict[str, Any]]:
    for file in sorted(folder.glob("*.job.json")):
        name, job = file.name.removesuffix(".job.json"), json.loads(file.read_text())
        code = folder / f"{name}.code"
        has_pod = (folder / f"{name}.pid").exists()
        if (folder / f"{name}.deleted").exists():
            if code.exists() or not has_pod:
                for left in folder.glob(f"{name}.*"):
                    left.unlink()
                continue
            job["metadata"]["deletionTimestamp"] = _stamp(datetime.now(UTC))
        if not wanted.items() <= job["metadata"]["labels"].items():
            continue
        pods, conditions = _status(int(code.read_text()) if code.exists() else None, has_pod=has_pod)
        over = folder / f"{name}.told.json"
        if over.exists():
            said = json.loads(over.read_text())
            pods, conditions = said["pods"], said["conditions"]
        yield job | {"status": {"conditions": conditions}}
        for status in pods:
            meta = {"name": f"{name}-x", "labels": job["spec"]["template"]["metadata"]["labels"]}
            yield {"kind": "Pod", "metadata": meta, "status": status}


def _status(code: int | None, *, has_pod: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    if code is None:
        return ([{"phase": "Running"}] if has_pod else []), []
    phase, kind = ("Succeeded", "Complete") if code == 0 else ("Failed", "Failed")
    ended = {"state": {"terminated": {"exitCode": code, "reason": "Completed" if code == 0 else "Error"}}}
    return [{"phase": phase, "containerStatuses": [ended]}], [{"type": kind, "status": "True"}]


def _delete(folder: Path, name: str) -> int:
    if not (folder / f"{name}.job.json").exists():
        return _fail(f'Error from server (NotFound): jobs.batch "{name}" not found')
    (folder / f"{name}.deleted").touch()
    pid = folder / f"{name}.pid"
    if pid.exists():
        with suppress(ProcessLookupError):
            os.kill(int(pid.read_text()), signal.SIGTERM)  # a node signals the first process alone
    print(f'job.batch "{name}" deleted')
    return 0
