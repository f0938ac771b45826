"""A Prometheus beside the run, in the namespace `monitoring`: it asks all that people and scalers ask.

It has an address of its own, and no way to a pod whose NetworkPolicies do not let it in.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import yaml

from deploy.grafana import queries
from deploy.grafana.prometheus import QueryError
from tests.deploy.custom_resources import Expression, MetricsEndpoint, PodMonitor
from tests.deploy.manifests import Object, kinds
from tests.deploy.node.network import PROMETHEUS, Pause, bar, connect, lets_in
from tests.deploy.node.pod import Pod
from tests.deploy.prometheus.prometheus_server import WatchingPrometheus, await_ready

IDENTITY: Final = {
    "namespace": {"kubernetes.io/metadata.name": "monitoring"},
    "pod": {"app.kubernetes.io/name": "prometheus"},
}
"""Labels of its namespace and, as the operator gives them, of its pod."""
_PORT: Final = 9090
_INDEX: Final = 99


def absent() -> str:
    """What this machine lacks for it; "" when nothing."""
    return "" if shutil.which("prometheus") else "no prometheus on PATH (Debian: prometheus)"


class Watch:
    """It, and what it is to look at. every_s: how often; a panel's rates look back over five times that."""

    def __init__(self, objects: tuple[Object, ...], pods: Sequence[Pod], work: Path, every_s: int) -> None:
        self._objects, self._pods, self._every_s = objects, pods, every_s
        self._folder = work / "prometheus"
        self._folder.mkdir()
        self._pause = Pause()
        self._prometheus = WatchingPrometheus(host=PROMETHEUS, port=_PORT)
        self._began = datetime.now(UTC)

    def start(self) -> None:
        settings = configuration(self._objects, self._pods, self._every_s)
        (self._folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
        (self._folder / "rules.yml").write_text(yaml.safe_dump(rules(self._objects)))
        connect(self._pause.pid, _INDEX, PROMETHEUS)
        for pod in self._pods:
            if not self._is_let_in(pod):
                bar(self._pause.pid, pod.address)
        command = [
            "nsenter", "-t", str(self._pause.pid), "-n",
            "prometheus", f"--config.file={self._folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address={PROMETHEUS}:{_PORT}", "--log.level=warn",
        ]  # fmt: skip
        log = self._folder / "prometheus.log"
        # The processors are the run's.
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=file, env={**os.environ, "GOMAXPROCS": "1"}
            )
        await_ready(process, self._prometheus, log)

    def _is_let_in(self, pod: Pod) -> bool:
        return any(
            lets_in(self._objects, pod.workload.labels, port["name"], IDENTITY)
            for container in pod.workload.spec["containers"]
            for port in container.get("ports", ())
        )

    def tell(self, awaited: str) -> Object:
        """What it knows, all of it newer than this call and than a value of `awaited`."""
        self._prometheus.until(lambda: bool(self._prometheus.query(awaited)), awaited)
        now = datetime.now(UTC)
        self._prometheus.until(lambda: self._has_looked_since(now), "a look at everything")
        return {
            "targets": self._targets(),
            "groups": self._groups(),
            "metrics": self._prometheus.get("label/__name__/values"),
            "labels": self._prometheus.get("labels"),
            "runs": self._runs(),
            "panels": [self._shown(panel, query) for panel, query in _panels()],
            "scalers": {
                one["metadata"]["name"]: self._prometheus.query(trigger["metadata"]["query"])
                for one in kinds(self._objects, "ScaledObject")
                for trigger in one["spec"]["triggers"]
            },
        }

    def _targets(self) -> list[Object]:
        return list(self._prometheus.get("targets", state="active")["activeTargets"])

    def _groups(self) -> list[Object]:
        return list(self._prometheus.get("rules")["groups"])

    def _has_looked_since(self, moment: datetime) -> bool:
        looks = [one["lastScrape"] for one in self._targets()]
        looks += [one["lastEvaluation"] for one in self._groups()]
        return all(datetime.fromisoformat(look) > moment for look in looks)

    def _runs(self) -> list[str]:
        return list(self._prometheus.get("label/run/values", **{"match[]": "penstock_cpu_seconds_total"}))

    def _shown(self, panel: queries.Panel, query: queries.Query) -> Object:
        asked = query.asked(run="|".join(self._runs()), window=f"{5 * self._every_s}s")
        shown: dict[str, Any] = {"dashboard": panel.dashboard, "title": panel.title, "legend": query.legend}
        began_s, ended_s = self._began.timestamp(), datetime.now(UTC).timestamp()
        try:
            found = self._prometheus.query_range(asked, began_s, ended_s, float(self._every_s))
        except QueryError as error:
            return shown | {"asked": asked, "error": str(error), "series": []}
        series = [
            {"labels": one["metric"], "values": [float(text) for _, text in one["values"] if text != "NaN"]}
            for one in found
        ]
        return shown | {"asked": asked, "error": "", "series": series}


def _panels() -> list[tuple[queries.Panel, queries.Query]]:
    return [
        (panel, query)
        for file in queries.files()
        for panel in queries.panels(file)
        for query in panel.queries
    ]


_POD: Final = "__meta_kubernetes_pod"


def configuration(objects: tuple[Object, ...], pods: Sequence[Pod], every_s: int) -> Object:
    """Of Prometheus. every_s: in place of each interval; everything else is as the objects say."""
    assert not kinds(objects, "ServiceMonitor", "Probe", "ScrapeConfig"), "not translated here"
    monitors = [PodMonitor.model_validate(one) for one in kinds(objects, "PodMonitor")]
    return {
        "global": {"scrape_interval": f"{every_s}s", "evaluation_interval": f"{every_s}s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [
            {
                "job_name": f"podMonitor/{monitor.metadata.namespace}/{monitor.metadata.name}/{index}",
                "static_configs": list(_discovered(pods, monitor.metadata.namespace)),
                "metrics_path": endpoint.path,
                "relabel_configs": list(_relabelings(monitor, endpoint)),
            }
            for monitor in monitors
            for index, endpoint in enumerate(monitor.spec.podMetricsEndpoints)
        ],
    }


def rules(objects: tuple[Object, ...]) -> Object:
    return {"groups": [group for one in kinds(objects, "PrometheusRule") for group in one["spec"]["groups"]]}


def _ports(pod: Pod) -> Iterator[tuple[Object, Object]]:
    for container in pod.workload.spec["containers"]:
        for port in container.get("ports", ()):
            yield container, port


def _discovered(pods: Sequence[Pod], namespace: str) -> Iterator[Object]:
    for pod in pods:
        labels = {
            "__meta_kubernetes_namespace": namespace,
            f"{_POD}_name": pod.name,
            f"{_POD}_ip": pod.address,
        }
        labels[f"{_POD}_phase"] = "Running"
        for name, value in pod.workload.labels.items():
            labels[f"{_POD}_label_{_sanitized(name)}"] = value
            labels[f"{_POD}_labelpresent_{_sanitized(name)}"] = "true"
        for container, port in _ports(pod):
            own = {
                f"{_POD}_container_name": container["name"],
                f"{_POD}_container_port_name": port["name"],
                f"{_POD}_container_port_number": str(port["containerPort"]),
            }
            yield {"targets": [f"{pod.address}:{port['containerPort']}"], "labels": labels | own}


def _relabelings(monitor: PodMonitor, endpoint: MetricsEndpoint) -> Iterator[Object]:
    yield {"action": "drop", "source_labels": [f"{_POD}_phase"], "regex": "(Failed|Succeeded)"}
    for name, value in monitor.spec.selector.matchLabels.items():
        yield _selected(Expression(key=name, operator="In", values=[value]))
    for expression in monitor.spec.selector.matchExpressions:
        yield _selected(expression)
    yield {"action": "keep", "source_labels": [f"{_POD}_container_port_name"], "regex": endpoint.port}
    yield {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"}
    yield {"source_labels": [f"{_POD}_container_name"], "target_label": "container"}
    yield {"source_labels": [f"{_POD}_name"], "target_label": "pod"}
    for name in map(_sanitized, monitor.spec.podTargetLabels):
        yield {"source_labels": [f"{_POD}_label_{name}"], "target_label": name, "regex": "(.+)"}
    yield {"target_label": "job", "replacement": f"{monitor.metadata.namespace}/{monitor.metadata.name}"}
    yield {"target_label": "endpoint", "replacement": endpoint.port}
    for one in endpoint.relabelings:
        yield {"source_labels": one.sourceLabels, "target_label": one.targetLabel}


def _selected(expression: Expression) -> Object:
    name = _sanitized(expression.key)
    both = [f"{_POD}_label_{name}", f"{_POD}_labelpresent_{name}"]
    values = {"source_labels": both, "regex": f"({'|'.join(expression.values)});true"}
    present = {"source_labels": both[1:], "regex": "true"}
    return {
        "In": {"action": "keep", **values},
        "NotIn": {"action": "drop", **values},
        "Exists": {"action": "keep", **present},
        "DoesNotExist": {"action": "drop", **present},
    }[expression.operator]


def _sanitized(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)
