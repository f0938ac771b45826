"""What the Prometheus operator makes of PodMonitors and PrometheusRules: the configuration of a Prometheus.

    pods ─► a target for each port, `__meta_kubernetes_…` (discovery)
         ─► keep: selector, port
         ─► namespace, container, pod, podTargetLabels, job, endpoint
         ─► the monitor's relabelings

As prometheus-operator writes it (generatePodMonitorConfig), for the fields that `custom_resources.PodMonitor`
knows: another one is refused there. Only discovery is replaced, by a list in place of the cluster's.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Final

from tests.deploy.custom_resources import Expression, MetricsEndpoint, PodMonitor
from tests.deploy.manifests import Object, kinds
from tests.deploy.node.pod import Pod

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
