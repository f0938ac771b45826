"""A node that runs a rendered overlay.

`unshare … python -m tests.deploy.node OVERLAY FOLDER LIMIT_S whole|short SCRAPE_S`.

Every pod starts at once, as after `kubectl apply`, and where there is a Prometheus it looks at them every
SCRAPE_S seconds; the run goes on until the learner says that it is finished. Then an operator looks at it,
everything is deleted at once, and `FOLDER/report.json` says what happened. It judges nothing.
"""

import json
import sys
import threading
import time
from dataclasses import asdict
from http.client import HTTPException
from pathlib import Path
from typing import Final

from tests.deploy.manifests import Workload, kinds, overlay, render, workloads
from tests.deploy.node.client import PLAYED, runner
from tests.deploy.node.network import DATABASE, Addresses, connect, open_network
from tests.deploy.node.pod import Pod, fetch, port_of
from tests.deploy.node.prometheus import Watch, absent
from tests.deploy.node.secrets import made_by_cert_manager, made_by_operator
from tests.deploy.node.volumes import Volumes

_TICK_S: Final = 0.2
_VISIT_S: Final = 60.0


class Node:
    def __init__(self, folder: Path, work: Path) -> None:
        self.objects, self.work = render(folder), work
        self.addresses = Addresses(self.objects)
        secrets, alone = {}, bool(kinds(self.objects, "Job"))
        if not alone:
            secrets = made_by_cert_manager(self.objects) | made_by_operator(work / "operator")
        self.volumes = Volumes(work, self.objects, secrets)
        self.outside = [self._pod(runner(self.objects), "client-0")]
        if not alone:
            self.outside.append(self._database())
        self.pods = [
            self._pod(workload, pod) for workload in workloads(self.objects) for pod in pod_names(workload)
        ]

    def _pod(self, workload: Workload, name: str) -> Pod:
        address = self.addresses.assign(name, workload)
        return Pod(workload, name, address, self.work, self.volumes, self.addresses.hosts)

    def _database(self) -> Pod:
        folder = self.work / "volumes" / "claim-certificates"
        folder.mkdir(parents=True)
        (folder / "registry.password").write_bytes(self.volumes.secrets["registry"]["password"])
        (registry,) = [one for one in workloads(overlay("local")) if one.name == "registry"]
        template = {**registry.template, "spec": {**registry.spec, "initContainers": []}}
        alone = Workload(
            kind="StatefulSet", name="database", replicas=1, template=template, claims=registry.claims
        )
        return Pod(alone, "database-0", DATABASE, self.work, self.volumes, self.addresses.hosts)

    def add(self, workload: Workload, name: str) -> Pod:
        """One more pod, as somebody who scales would have it; its container is visited, not started."""
        pod = self._pod(workload, name)
        connect(pod.pause_pid, len(self.outside) + len(self.pods), pod.address)
        return pod

    def start(self) -> None:
        open_network()
        for index, pod in enumerate([*self.outside, *self.pods]):
            connect(pod.pause_pid, index, pod.address)
        for pod in [*self.outside, *self.pods]:
            pod.start()

    def of(self, name: str) -> list[Pod]:
        return [pod for pod in self.pods if pod.workload.name == name]

    def await_end(self, limit_s: float) -> bool:
        """Until the learner's account says that the run is finished, and every pod has been ready."""
        account = self.volumes.claim("learner-0", "data") / "run" / "learner.json"
        waiting = {pod.name for pod in self.pods}
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            waiting -= {pod.name for pod in self.pods if pod.ready.is_set() or pod.ended.is_set()}
            if account.exists() and not waiting:
                return True
            time.sleep(_TICK_S)
        return False

    def drain(self, *, whole: bool) -> None:
        """Delete everything at once; unless `whole`, what waits for others goes as soon as they are gone."""
        release = threading.Event()
        serving = [pod for pod in self.pods if pod.workload.serves]
        threads = {pod.name: threading.Thread(target=pod.drain, args=(release,)) for pod in serving}
        for thread in threads.values():
            thread.start()
        for pod in serving:
            if pod.workload.name not in ("redis", "registry"):
                threads[pod.name].join()
        if not whole:
            release.set()
        for thread in threads.values():
            thread.join()


def pod_names(workload: Workload) -> list[str]:
    middle = "-" if workload.kind == "StatefulSet" else "-5d8f9c7b4-x7k2"
    return [f"{workload.name}{middle}{index}" for index in range(workload.replicas)]


def look(node: Node) -> dict[str, tuple[int, str]]:
    command = ["penstock", "status", "--broker=broker:50051", "--config=/etc/penstock/run.toml", "--json"]
    lookers = {"actor": node.of("actor")[0]}
    wanted = [one for one in workloads(node.objects) if one.name == "operator"]
    for workload in wanted:
        lookers["operator"] = node.add(workload, "operator-5d8f9c7b4-x7k20")
    return {name: pod.visit(command, _VISIT_S) for name, pod in lookers.items()}


def scrape(node: Node) -> dict[str, str]:
    told = {}
    for pod in node.pods:
        (container,) = pod.workload.spec["containers"]
        if any(port["name"] == "metrics" for port in container.get("ports", ())):
            try:
                told[pod.name] = fetch(pod.address, port_of(container, "metrics"), "/metrics", _VISIT_S)[1]
            except (OSError, HTTPException) as error:
                told[pod.name] = str(error)
    return told


def main(folder: Path, work: Path, *, limit_s: float, whole: bool, scrape_s: int) -> None:
    node = Node(folder, work)
    node.start()
    watch = None if absent() else Watch(node.objects, node.pods, work, scrape_s)
    if watch is not None:
        watch.start()
    finished = node.await_end(limit_s)
    visits, metrics = look(node), scrape(node)
    seen = watch.tell(PLAYED) if watch is not None and finished else {"absent": absent()}
    ready = {pod.name: pod.ready.is_set() for pod in node.pods}
    node.drain(whole=whole)
    run = node.volumes.claim("learner-0", "data") / "run"
    report = {
        "finished": finished,
        "visits": visits,
        "metrics": metrics,
        "prometheus": seen,
        "ready": ready,
        "pods": {
            pod.name: {
                "workload": pod.workload.name,
                "stories": [asdict(story) for story in pod.stories.values()],
            }
            for pod in node.pods
        },
        "learner": json.loads((run / "learner.json").read_text())
        if (run / "learner.json").exists()
        else None,
        "words": "\n".join(pod.last_words() for pod in [*node.outside, *node.pods]),
    }
    (work / "report.json").write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    overlay_folder, work_folder = map(Path, sys.argv[1:3])
    main(
        overlay_folder,
        work_folder,
        limit_s=float(sys.argv[3]),
        whole=sys.argv[4] == "whole",
        scrape_s=int(sys.argv[5]),
    )
