"""A pod: a network of its own, its volumes as folders, its containers as processes, its probes.

initial containers, one after the other ─► container ─► started ─► ready … ─► preStop ─► SIGTERM ─► gone
                                             ▲             │ not alive, or it ended
                                             └─ back-off ──┘
What Kubernetes would do is done as the manifest says it; the back-off between restarts is shorter.
"""

import http.client
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.deploy.manifests import ROOT, Object, Workload
from tests.deploy.node.container import Mount, Spec
from tests.deploy.node.images import image
from tests.deploy.node.network import Pause
from tests.deploy.node.volumes import Volumes, expand

BACK_OFF_S: Final = (1.0, 2.0, 4.0, 8.0)
_TICK_S: Final = 0.2


@dataclass(slots=True)
class Story:
    container: str
    image: str
    starts: int = 0
    exits: list[int] = field(default_factory=list)
    probed: dict[str, int] = field(default_factory=dict)
    """Successful answers to each probe."""
    last_failure: str = ""
    drained: int | None = None
    """Exit code after SIGTERM, -9 when it had to be killed."""


class Pod:
    def __init__(
        self,
        workload: Workload,
        name: str,
        address: str,
        work: Path,
        volumes: Volumes,
        hosts: Callable[[str], str],
    ) -> None:
        self.workload, self.name, self.address = workload, name, address
        self.ready = threading.Event()
        self.ended = threading.Event()
        self.stories: dict[str, Story] = {}
        self._work = work / name
        self._work.mkdir()
        self._volumes, self._hosts = volumes, hosts
        self._stopping = threading.Event()
        self._main: subprocess.Popen[bytes] | None = None
        self._pause = Pause()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def pause_pid(self) -> int:
        return self._pause.pid

    def start(self) -> None:
        subprocess.run(["nsenter", "-t", str(self.pause_pid), "-u", "hostname", self.name], check=True)
        self._thread.start()

    def _run(self) -> None:
        spec = self.workload.spec
        for container in spec.get("initContainers", ()):
            if not self._to_the_end(container):
                return
        (container,) = spec["containers"]
        if not self.workload.serves:
            self._to_the_end(container)
            self.ended.set()
            return
        attempt = 0
        while not self._stopping.is_set():
            self._live(container)
            self.ready.clear()
            self._stopping.wait(BACK_OFF_S[min(attempt, len(BACK_OFF_S) - 1)])
            attempt += 1
        self.ended.set()

    def _to_the_end(self, container: Object) -> bool:
        story = self._story(container)
        process = self._start(container, story)
        code = process.wait()
        story.exits.append(code)
        return code == 0

    def _live(self, container: Object) -> None:
        story = self._story(container)
        self._main = process = self._start(container, story)
        begun, failures = time.monotonic(), dict.fromkeys(("startup", "readiness", "liveness"), 0)
        due = dict.fromkeys(failures, begun)
        started = False
        while process.poll() is None and not self._stopping.wait(_TICK_S):
            for kind in ("readiness", "liveness") if started else ("startup",):
                probe = container[f"{kind}Probe"]
                if time.monotonic() < due[kind]:
                    continue
                due[kind] = time.monotonic() + probe.get("periodSeconds", 10)
                wrong = self._ask(container, probe)
                failures[kind] = failures[kind] + 1 if wrong else 0
                if wrong:
                    story.last_failure = f"{kind}: {wrong}"
                else:
                    story.probed[kind] = story.probed.get(kind, 0) + 1
                given_up = failures[kind] >= probe.get("failureThreshold", 3)
                if kind == "startup":
                    started = not wrong
                elif kind == "readiness" and (not wrong or given_up):
                    (self.ready.set if not wrong else self.ready.clear)()
                if given_up and kind != "readiness":
                    process.terminate()
        if not self._stopping.is_set():
            story.exits.append(process.wait())

    def _story(self, container: Object) -> Story:
        name = container["name"]
        return self.stories.setdefault(name, Story(container=name, image=container["image"]))

    def _start(self, container: Object, story: Story) -> "subprocess.Popen[bytes]":
        story.starts += 1
        stands_for = image(container["image"])
        entry_point = () if "command" in container else stands_for.entry_point
        environment = self._environment(container)
        words = [*container.get("command", ()), *container.get("args", ())]
        command = [*entry_point, *(expand(word, environment) for word in words)]
        return self._process(container, command, stands_for.environment | environment, container["name"])

    def _environment(self, container: Object) -> dict[str, str]:
        fields = {"metadata.name": self.name, "status.podIP": self.address}
        own = {}
        for variable in container.get("env", ()):
            own[variable["name"]] = self._volumes.value(variable, fields)
        return own | {"HOSTNAME": self.name}

    def _process(
        self, container: Object, command: list[str], environment: dict[str, str], log: str
    ) -> "subprocess.Popen[bytes]":
        context = self.workload.spec["securityContext"]
        assert container["securityContext"]["readOnlyRootFilesystem"], container["name"]
        mounts = [
            Mount(
                source=str(self._volumes.source(self.workload, self.name, mount)),
                target=mount["mountPath"],
                read_only=mount.get("readOnly", False),
            )
            for mount in container["volumeMounts"]
        ]
        user, stands_for = context["runAsUser"], image(container["image"])
        named = f"penstock:x:{user}:{user}::/tmp:/bin/sh\n" if stands_for.names_its_user else ""
        spec = Spec(
            command=command,
            environment=environment,
            mounts=mounts,
            programs=list(stands_for.programs),
            etc={
                "hosts": self._hosts(self.name),
                "hostname": f"{self.name}\n",
                "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
                "resolv.conf": "",
                "passwd": f"root:x:0:0::/:/bin/sh\n{named}",
                "group": "root:x:0:\n",
            },
            root=str(self._work / "root"),
            user=user,
        )
        path = self._work / f"{log}.json"
        spec.write(path)
        enter = ["nsenter", "-t", str(self.pause_pid), "-n", "-u", "-i", "unshare", "--mount"]
        with (self._work / f"{log}.log").open("ab") as file:
            return subprocess.Popen(
                [*enter, sys.executable, "-m", "tests.deploy.node.container", str(path)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )

    def _ask(self, container: Object, probe: Object) -> str:
        timeout = probe.get("timeoutSeconds", 1)
        if "exec" in probe:
            return self._run_inside(container, probe["exec"]["command"], timeout)
        return ask_http(self.address, container, probe["httpGet"], timeout)

    def _run_inside(self, container: Object, command: list[str], timeout: float) -> str:
        environment = image(container["image"]).environment | self._environment(container)
        process = self._process(container, command, environment, f"{container['name']}-probe")
        try:
            code = process.wait(timeout + 5.0)  # this machine is slower at it than a node
        except subprocess.TimeoutExpired:
            process.kill()
            return f"no answer to {command[0]}"
        return "" if code == 0 else f"{command[0]} ended with {code}"

    def visit(self, command: list[str], timeout: float) -> tuple[int, str]:
        """Run a command as this pod's container would; its exit code and what it wrote."""
        (container,) = self.workload.spec["containers"]
        environment = image(container["image"]).environment | self._environment(container)
        (self._work / "visit.log").unlink(missing_ok=True)
        process = self._process(container, command, environment, "visit")
        return process.wait(timeout), (self._work / "visit.log").read_text(errors="replace")

    def drain(self, release: threading.Event) -> None:
        """preStop, SIGTERM, grace period, SIGKILL. `release` cuts preStop short."""
        (container,) = self.workload.spec["containers"]
        grace_s = self.workload.spec["terminationGracePeriodSeconds"]
        begun = time.monotonic()
        release.wait(container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0))
        self._stopping.set()
        story, process = self._story(container), self._main
        assert process is not None
        process.send_signal(signal.SIGTERM)
        try:
            story.drained = process.wait(max(0.0, begun + grace_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            story.drained = process.wait()
        self._thread.join()

    def last_words(self) -> str:
        return "\n".join(
            f"--- {self.name} {path.name}\n{path.read_text(errors='replace')[-1500:]}"
            for path in sorted(self._work.glob("*.log"))
        )


def ask_http(address: str, container: Object, get: Object, timeout: float) -> str:
    """What is wrong with the answer to a GET, "" when nothing.

    `get` names a port of the container, and a path.
    """
    try:
        status, text = fetch(address, port_of(container, get["port"]), get["path"], timeout)
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
    return "" if 200 <= status < 400 else f"{status} {text}"


def fetch(address: str, port: int, path: str, timeout: float) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address, port, timeout=timeout)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        return reply.status, reply.read().decode(errors="replace").strip()
    finally:
        connection.close()


def port_of(container: Object, name: str) -> int:
    (number,) = [port["containerPort"] for port in container["ports"] if port["name"] == name]
    return int(number)
