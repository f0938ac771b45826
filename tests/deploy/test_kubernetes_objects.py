"""Every overlay builds offline, and every object is what its schema says."""

import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from penstock.config.settings import load, parse_toml
from penstock.rpc.identity import Party, parse
from tests.deploy import command_line
from tests.deploy.custom_resources import KINDS, Certificate
from tests.deploy.manifests import (
    COMPONENT,
    OVERLAYS,
    ROOT,
    Object,
    all_containers,
    kinds,
    name_of,
    needs_kubectl,
    overlay,
    render,
    with_components,
    workloads,
)

pytestmark = needs_kubectl

OLDEST = "1.30"
"""The first that has `preStop.sleep`."""
NEWEST = "1.37"
LARGEST_ANNOTATION = 256 * 1024


@pytest.mark.parametrize(
    ("name", "version"), [*((name, OLDEST) for name in OVERLAYS), ("production", NEWEST)]
)
def test_every_object_is_valid(name: str, version: str) -> None:
    for one in overlay(name):
        if one["kind"] in KINDS:
            KINDS[one["kind"]].model_validate(one)
        else:
            kubernetes_validate.validate(one, version, strict=True)


@pytest.mark.parametrize("name", OVERLAYS)
def test_objects_belong_to_the_namespace_and_are_named_once(name: str) -> None:
    objects = overlay(name)
    names = [name_of(one) for one in objects]
    assert sorted(set(names)) == sorted(names)
    for one in objects:
        assert one["kind"] == "Namespace" or one["metadata"]["namespace"] == "penstock", name_of(one)


@pytest.mark.parametrize("component", ["monitoring", "ranks"])
def test_a_component_adds_to_the_namespace(component: str, tmp_path: Path) -> None:
    for one in render(with_components(tmp_path / "mine", component)):
        assert one["kind"] == "Namespace" or one["metadata"].get("namespace") == "penstock", name_of(one)


@pytest.mark.parametrize("name", OVERLAYS)
def test_what_is_named_is_there(name: str) -> None:
    objects = overlay(name)
    there = {name_of(one) for one in objects} | {
        f"Secret/{one['spec']['secretName']}" for one in kinds(objects, "Certificate")
    }
    if name in {"plain", "production"}:
        there |= {"Secret/redis-users", "Secret/registry"}
    if name == "plain":
        issued = kinds(overlay("production"), "Certificate")
        there |= {f"Secret/{one['spec']['secretName']}" for one in issued}
    for workload in workloads(objects):
        assert f"ServiceAccount/{workload.spec['serviceAccountName']}" in there, workload.name
        volumes = {claim["metadata"]["name"] for claim in workload.claims}
        for volume in workload.spec["volumes"]:
            volumes.add(volume["name"])
            assert set(_sources(volume)) <= there, (workload.name, volume)
        for label, container in workload.containers():
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes, label
            assert set(_environment_sources(container)) <= there, label
            ports = {port["name"] for port in container.get("ports", ())}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                if "httpGet" in container.get(probe, {}):
                    assert container[probe]["httpGet"]["port"] in ports, label


def _sources(volume: Object) -> list[str]:
    if "projected" in volume:
        return [f"Secret/{source['secret']['name']}" for source in volume["projected"]["sources"]]
    if "secret" in volume:
        return [f"Secret/{volume['secret']['secretName']}"]
    if "configMap" in volume:
        return [f"ConfigMap/{volume['configMap']['name']}"]
    if "persistentVolumeClaim" in volume:
        return [f"PersistentVolumeClaim/{volume['persistentVolumeClaim']['claimName']}"]
    return []


def _environment_sources(container: Object) -> list[str]:
    found = []
    for variable in container.get("env", ()):
        for key, value in variable.get("valueFrom", {}).items():
            found.append(f"{'Secret' if key == 'secretKeyRef' else 'ConfigMap'}/{value['name']}")
    return found


@pytest.mark.parametrize("name", OVERLAYS)
def test_commands_and_settings_are_known(name: str) -> None:
    ours = [one for _, one in all_containers(overlay(name)) if one.get("command", [])[:1] == ["penstock"]]
    for container in ours:
        environment = {one["name"]: one.get("value", "of a secret") for one in container.get("env", ())}
        command_line.check([*container["command"][1:], *container.get("args", ())], environment)
    assert len(ours) >= 5


@pytest.mark.parametrize("name", OVERLAYS)
def test_services_find_pods_and_ports(name: str) -> None:
    objects = overlay(name)
    for service in kinds(objects, "Service"):
        found = [w for w in workloads(objects) if service["spec"]["selector"].items() <= w.labels.items()]
        assert len(found) == 1, name_of(service)
        ports = {p["name"] for _, container in found[0].containers() for p in container.get("ports", ())}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports, name_of(service)


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_run_has_one_name(name: str, tmp_path: Path) -> None:
    objects = overlay(name)
    run = _configuration(objects, tmp_path).run
    wanted = f"--run={run}"
    jobs = [container for label, container in all_containers(objects) if label.startswith("Job/")]
    assert all(wanted in job["args"] for job in jobs)
    uris = [parse(uri) for one in map(_certificate, kinds(objects, "Certificate")) for uri in one.spec.uris]
    assert {uri.run for uri in uris} <= {run}
    assert jobs or name == "plain" or {uri.party for uri in uris} == set(Party)


def _certificate(one: Object) -> Certificate:
    return Certificate.model_validate(one)


def test_production_has_the_dashboards() -> None:
    maps = [one for one in kinds(overlay("production"), "ConfigMap") if one["metadata"].get("labels")]
    found = {
        name: text
        for one in maps
        if one["metadata"]["labels"].get("grafana_dashboard") == "1"
        for name, text in one["data"].items()
    }
    assert found == {path.name: path.read_text() for path in (ROOT / "deploy" / "grafana").glob("*.json")}
    assert all(len(json.dumps(one)) < LARGEST_ANNOTATION for one in maps)


def _configuration(objects: tuple[Object, ...], folder: Path) -> Any:
    (found,) = [one for one in kinds(objects, "ConfigMap") if "run.toml" in one["data"]]
    path = folder / "run.toml"
    path.write_text(found["data"]["run.toml"])
    return load([parse_toml(path)])


def test_servers_are_known_by_the_names_that_callers_use() -> None:
    objects = overlay("production")
    names = {
        one["metadata"]["name"]: set(_certificate(one).spec.dnsNames) for one in kinds(objects, "Certificate")
    }
    for service in kinds(objects, "Service"):
        called = service["metadata"]["name"]
        if called != "learner":  # its Service names pods for Prometheus; it is not called over TLS
            assert {called, f"{called}.penstock.svc"} - names[called] == set()
    words = " ".join(word for _, container in all_containers(objects) for word in container.get("args", ()))
    assert set(re.findall(r"dns:///([a-z]+):", words)) == {"broker"}


@pytest.mark.parametrize("name", OVERLAYS)
def test_grace_periods_hold_the_drain(name: str, tmp_path: Path) -> None:
    objects = overlay(name)
    assert _configuration(objects, tmp_path).broker.drain_delay_s == 5
    drains = {"broker": 5 + 10, "actor": 10, "server": 5 + 10, "redis": 10, "learner": 60}
    ends = {}
    for workload in workloads(objects):
        (container,) = workload.spec["containers"]
        before = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        drain = drains.get(workload.labels[COMPONENT], 0)
        ends[workload.labels[COMPONENT]] = (before, before + drain)
        if workload.serves:
            assert before + drain < workload.spec["terminationGracePeriodSeconds"], workload.name
    # No process ends before those that still write to it have had their time.
    assert ends["actor"][1] <= ends["broker"][0] + 5
    assert ends["broker"][1] <= ends["redis"][0]


def test_the_overlay_of_the_page_builds(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    small, block = re.findall(r"```yaml\n# kustomization.yaml\n(.*?)```", page, re.DOTALL)
    assert "components/two-cores" in small
    folder = tmp_path / "mine"
    folder.mkdir()
    here = "../" * (len(folder.parts) - 1) + str(ROOT.relative_to("/"))
    (folder / "kustomization.yaml").write_text(block.replace("penstock/deploy/", f"{here}/deploy/"))
    (folder / "run.toml").write_text('run = "mine"\n')
    objects = render(folder)
    assert "redis" not in [workload.name for workload in workloads(objects)]
    assert "Service/redis" not in map(name_of, objects)
    addresses = [one["data"]["REDIS"] for one in kinds(objects, "ConfigMap") if "REDIS" in one["data"]]
    assert addresses == ["redis.example:6379"]
    assert _configuration(objects, tmp_path).run == "mine"
    images = {container["image"] for _, container in all_containers(objects)}
    assert {"registry.example/penstock-actor:0.1.0", "penstock-learner:0.1.0-cuda"} <= images
    (to_redis,) = [one for one in kinds(objects, "NetworkPolicy") if one["metadata"]["name"] == "to-redis"]
    assert to_redis["spec"]["egress"][0]["to"] == [{"ipBlock": {"cidr": "192.0.2.7/32"}}]
    (learner,) = [workload for workload in workloads(objects) if workload.name == "learner"]
    assert learner.spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    for one in objects:
        if one["kind"] not in KINDS:
            kubernetes_validate.validate(one, NEWEST, strict=True)


def test_two_cores_are_enough_for_the_component_of_two_cores(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    for objects, said in (
        (overlay("local"), "4.4"),
        (render(with_components(tmp_path / "two", "two-cores")), "1.3"),
    ):
        requests = [
            workload.replicas * _cores(container["resources"]["requests"]["cpu"])
            for workload in workloads(objects)
            for container in workload.spec["containers"]
        ]
        assert f"{sum(requests):.1f}" == said
        assert f"{said} " in page


def _cores(quantity: str) -> float:
    return float(quantity.removesuffix("m")) / 1000 if quantity.endswith("m") else float(quantity)
