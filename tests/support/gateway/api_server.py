"""An API server of Kubernetes with one node: it keeps Jobs, and runs their pods as processes here.

It stands for a cluster where there is none, and answers by HTTP what the gateway asks of one. Objects must be
valid by Kubernetes' own schemas, and who asks must have the token of its kubeconfig. A test has it say what a
real cluster would have to come to first.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate

NAMESPACE: Final = "penstock-gateway"
TOKEN: Final = "a-token"  # noqa: S105 - of this server alone
_JOBS: Final = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs"
_PODS: Final = f"/api/v1/namespaces/{NAMESPACE}/pods"


@dataclass(slots=True, eq=False)
class _Kept:
    """A Job with its pod. said: pods and conditions in place of what is true."""

    job: dict[str, Any]
    process: subprocess.Popen[bytes] | None = None
    is_deleted: bool = False
    said: tuple[list[dict[str, Any]], list[dict[str, Any]]] | None = None


@dataclass(slots=True, eq=False)
class _Refused(Exception):
    status: int
    reason: str
    message: str


@dataclass(slots=True, eq=False)
class ApiServer:
    """A cluster, for tests. folder: where its kubeconfig lies.

    is_away: it hangs up. overload: the status by which it says that it has no time, 0: it has.
    is_forbidden: nobody may make anything. is_podless: Jobs get no pod. created: the names of all Jobs that
    were ever made, in order.
    """

    folder: Path
    is_away: bool = False
    overload: int = 0
    is_forbidden: bool = False
    is_podless: bool = False
    created: list[str] = field(default_factory=list)
    _kept: dict[str, _Kept] = field(default_factory=dict)
    _lock: Any = field(default_factory=threading.RLock)
    _server: Any = None

    def begin(self) -> None:
        handler = type("Bound", (_Handler,), {"cluster": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        cluster = {"server": f"http://127.0.0.1:{self._server.server_port}"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "gateway"}}],
            "clusters": [{"name": "here", "cluster": cluster}],
            "users": [{"name": "gateway", "user": {"token": TOKEN}}],
        }
        self.kubeconfig.write_text(json.dumps(config))

    def end(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        for one in self._kept.values():
            if one.process is not None:
                with suppress(ProcessLookupError):
                    os.killpg(one.process.pid, signal.SIGKILL)
                one.process.wait()

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"

    @property
    def there(self) -> list[str]:
        with self._lock:
            self._let_go()
            return sorted(self._kept)

    def exit_code(self, name: str) -> int | None:
        process = self._kept[name].process
        return None if process is None else process.poll()

    def say(self, name: str, pods: list[dict[str, Any]], conditions: list[dict[str, Any]]) -> None:
        self._kept[name].said = pods, conditions

    def grow_old(self, name: str, seconds: float) -> None:
        past = datetime.now(UTC) - timedelta(seconds=seconds)
        self._kept[name].job["metadata"]["creationTimestamp"] = _stamp(past)

    def take_away(self, name: str) -> None:
        del self._kept[name]

    # ---- what it answers

    def answer(self, method: str, path: str, query: dict[str, str], body: Any) -> dict[str, Any]:
        """Return the answer to a request; raises _Refused."""
        with self._lock:
            self._let_go()
            match method, path.removeprefix(f"{_JOBS}/") if path.startswith(f"{_JOBS}/") else path:
                case "POST", path_ if path_ == _JOBS:
                    return self._create(query, body)
                case "GET", path_ if path_ in (_JOBS, _PODS):
                    wanted = dict(pair.split("=") for pair in query["labelSelector"].split(","))
                    found = self._jobs(wanted) if path_ == _JOBS else self._pods(wanted)
                    return {"kind": "List", "metadata": {"resourceVersion": "1"}, "items": list(found)}
                case "DELETE", name:
                    return self._delete(name, query)
        raise _Refused(404, "NotFound", "the server could not find the requested resource")

    def _create(self, query: dict[str, str], one: dict[str, Any]) -> dict[str, Any]:
        name = one["metadata"]["name"]
        if self.is_forbidden:
            who = f"system:serviceaccount:{NAMESPACE}:gateway"
            said = f'jobs.batch is forbidden: User "{who}" cannot create resource "jobs"'
            raise _Refused(403, "Forbidden", said)
        if name in self._kept:
            raise _Refused(409, "AlreadyExists", f'jobs.batch "{name}" already exists')
        assert query == {"fieldValidation": "Strict"}
        kubernetes_validate.validate(one, "1.30", strict=True)
        one["metadata"]["creationTimestamp"] = _stamp(datetime.now(UTC))
        kept = self._kept[name] = _Kept(one)
        self.created.append(name)
        if not self.is_podless:
            kept.process = self._begin_pod(one)
        return one

    def _begin_pod(self, job: dict[str, Any]) -> subprocess.Popen[bytes]:
        """Begin the container of a Job's pod, as a node does; `python` is that of the tests."""
        (container,) = job["spec"]["template"]["spec"]["containers"]
        own = {one["name"]: one["value"] for one in container["env"] if "value" in one}
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        return subprocess.Popen(
            container["command"],
            cwd=container["workingDir"],
            env={**os.environ, **own, "PATH": path},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _delete(self, name: str, query: dict[str, str]) -> dict[str, Any]:
        assert query == {"propagationPolicy": "Foreground"}
        if name not in self._kept:
            raise _Refused(404, "NotFound", f'jobs.batch "{name}" not found')
        kept = self._kept[name]
        kept.is_deleted = True
        if kept.process is not None:
            kept.process.terminate()  # a node signals the first process alone
        return {"kind": "Status", "status": "Success"}

    def _let_go(self) -> None:
        """A Job that is deleted is gone once its pod is."""
        for name, one in list(self._kept.items()):
            if one.is_deleted and (one.process is None or one.process.poll() is not None):
                del self._kept[name]

    def _jobs(self, wanted: dict[str, str]) -> Iterator[dict[str, Any]]:
        for one in self._kept.values():
            if wanted.items() <= one.job["metadata"]["labels"].items():
                more = {"deletionTimestamp": _stamp(datetime.now(UTC))} if one.is_deleted else {}
                yield one.job | {
                    "metadata": one.job["metadata"] | more,
                    "status": {"conditions": _said(one)[1]},
                }

    def _pods(self, wanted: dict[str, str]) -> Iterator[dict[str, Any]]:
        for name, one in self._kept.items():
            labels = one.job["spec"]["template"]["metadata"]["labels"]
            if wanted.items() <= labels.items():
                for status in _said(one)[0]:
                    yield {"metadata": {"name": f"{name}-x", "labels": labels}, "status": status}


class _Handler(BaseHTTPRequestHandler):
    cluster: ApiServer

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if self.cluster.is_away:
            self.close_connection = True
            return
        try:
            if self.headers["Authorization"] != f"Bearer {TOKEN}":
                raise _Refused(401, "Unauthorized", "Unauthorized")
            if self.cluster.overload:
                raise _Refused(self.cluster.overload, "TooManyRequests", "the server has no time")
            said = self.cluster.answer(self.command, parts.path, query, json.loads(body or b"null"))
            self._send(200, said)
        except _Refused as error:
            status = {"kind": "Status", "status": "Failure", "reason": error.reason, "code": error.status}
            self._send(error.status, status | {"message": error.message})

    do_GET = do_POST = do_DELETE = _answer  # noqa: N815 - names of the library

    def _send(self, code: int, said: dict[str, Any]) -> None:
        content = json.dumps(said).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as the library has it
        """Nothing is printed."""


def _stamp(at: datetime) -> str:
    return at.isoformat(timespec="seconds").replace("+00:00", "Z")


def _said(one: _Kept) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    if one.said is not None:
        return one.said
    code = None if one.process is None else one.process.poll()
    if code is None:
        return ([] if one.process is None else [{"phase": "Running"}]), []
    phase, kind = ("Succeeded", "Complete") if code == 0 else ("Failed", "Failed")
    state = {"exitCode": code if code >= 0 else 128 - code, "reason": "Completed" if code == 0 else "Error"}
    pod = {"phase": phase, "containerStatuses": [{"state": {"terminated": state}}]}
    return [pod], [{"type": kind, "status": "True"}]
