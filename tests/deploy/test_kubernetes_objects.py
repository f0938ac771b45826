"""Every overlay builds offline, its objects are what their schemas say, and what they name is there."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import pytest
import yaml
from torch.distributed.run import get_args_parser

from penstock.config.settings import load, parse_toml
from penstock.rpc.identity import Party, parse
from tests.deploy.custom_resources import KINDS, Certificate
from tests.deploy.manifests import (
    COMPONENT,
    OVERLAYS,
    ROOT,
    Object,
    Workload,
    all_containers,
    check_command,
    kinds,
    name_of,
    needs_kubectl,
    of_page,
    overlay,
    render,
    selects,
    with_components,
    workloads,
)

pytestmark = needs_kubectl

OLDEST: Final = "1.30"
"""The first that has `preStop.sleep`."""
NEWEST: Final = "1.37"
LARGEST_ANNOTATION: Final = 256 * 1024
OF_OPERATOR: Final = {"Secret/redis-users", "Secret/registry"}
OUTSIDE: Final = {
    "plain": OF_OPERATOR,
    "production": OF_OPERATOR,
    "kubernetes.md": OF_OPERATOR,
    "ranks.md": OF_OPERATOR,
    "gateway": {"Secret/keys", "Secret/database"},
    "gateway-jobs": {"Secret/keys", "Secret/database", "ConfigMap/templates"},
}
"""What somebody makes who applies the overlay; no manifest holds it."""
RUN: Final = "penstock"
"""What the PodMonitor makes of the namespace."""


@pytest.fixture(scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def objects(name: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Object, ...]:
    folder = tmp_path_factory.mktemp("overlay") / "mine"
    if name.endswith(".md"):
        return render(of_page(folder, name))
    if name == "gateway-jobs":
        return render(with_components(folder, name, base="gateway", namespace="penstock-gateway"))
    return render(with_components(folder, name)) if name in {"monitoring", "ranks"} else overlay(name)


every_overlay = pytest.mark.parametrize(
    "name",
    [*OVERLAYS, "monitoring", "ranks", "kubernetes.md", "ranks.md", "gateway", "gateway-jobs"],
    indirect=True,
)
of_overlays = pytest.mark.parametrize("name", OVERLAYS, indirect=True)
of_ranks = pytest.mark.parametrize("name", ["ranks.md"], indirect=True)


@every_overlay
def test_every_object_is_valid(name: str, objects: tuple[Object, ...]) -> None:
    for one in objects:
        if one["kind"] in KINDS:
            KINDS[one["kind"]].model_validate(one)
            continue
        kubernetes_validate.validate(one, OLDEST, strict=True)
        if name in {"production", "kubernetes.md"}:
            kubernetes_validate.validate(one, NEWEST, strict=True)


@every_overlay
def test_objects_belong_to_the_namespace_and_are_named_once(objects: tuple[Object, ...]) -> None:
    names = [name_of(one) for one in objects]
    assert sorted(set(names)) == sorted(names)
    (namespace,) = kinds(objects, "Namespace")
    for one in objects:
        assert one is namespace or one["metadata"]["namespace"] == namespace["metadata"]["name"], name_of(one)


@every_overlay
def test_named_objects_exist(name: str, objects: tuple[Object, ...]) -> None:
    there = {name_of(one) for one in objects}
    issued = overlay("production") if name == "plain" else objects
    there |= {f"Secret/{one['spec']['secretName']}" for one in kinds(issued, "Certificate")}
    named = set()
    for workload in workloads(objects):
        named.add(f"ServiceAccount/{workload.spec['serviceAccountName']}")
        volumes = {claim["metadata"]["name"] for claim in workload.claims}
        for volume in workload.spec["volumes"]:
            volumes.add(volume["name"])
            named |= set(_sources(volume))
        for label, container in workload.containers():
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes, label
            named |= set(_environment_sources(container))
            ports = {port["name"] for port in container.get("ports", ())}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                if "httpGet" in container.get(probe, {}):
                    assert container[probe]["httpGet"]["port"] in ports, label
    assert named - there == OUTSIDE.get(name, set())


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
            if key != "fieldRef":
                found.append(f"{'Secret' if key == 'secretKeyRef' else 'ConfigMap'}/{value['name']}")
    return found


@every_overlay
def test_commands_and_settings_are_known(name: str, objects: tuple[Object, ...]) -> None:
    ours = [one for _, one in all_containers(objects) if one.get("command", [])[:1] == ["penstock"]]
    found = [check_command(container).command.name for container in ours]
    if "gateway" in name:
        assert sorted(found) == ["gateway", "migrate"]
    else:
        assert len(found) >= (4 if "ranks" in name else 5)  # torchrun starts learners of ranks


@every_overlay
def test_services_find_pods_and_ports(objects: tuple[Object, ...]) -> None:
    for service in kinds(objects, "Service"):
        (found,) = [w for w in workloads(objects) if service["spec"]["selector"].items() <= w.labels.items()]
        ports = {p["name"] for _, container in found.containers() for p in container.get("ports", ())}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports, name_of(service)


@of_overlays
def test_the_run_has_one_name(name: str, objects: tuple[Object, ...], tmp_path: Path) -> None:
    run = _configuration(objects, tmp_path).run
    jobs = [container for label, container in all_containers(objects) if label.startswith("Job/")]
    assert all(f"--run={run}" in job["args"] for job in jobs)
    certificates = map(Certificate.model_validate, kinds(objects, "Certificate"))
    uris = [parse(uri) for one in certificates for uri in one.spec.uris]
    assert {uri.run for uri in uris} <= {run}
    assert jobs or name == "plain" or {uri.party for uri in uris} == set(Party)


def _configuration(objects: tuple[Object, ...], folder: Path) -> Any:
    (found,) = [one for one in kinds(objects, "ConfigMap") if "run.toml" in one["data"]]
    path = folder / "run.toml"
    path.write_text(found["data"]["run.toml"])
    return load([parse_toml(path)])


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


def test_servers_are_known_by_the_names_that_callers_use() -> None:
    objects = overlay("production")
    names = {
        one["metadata"]["name"]: set(Certificate.model_validate(one).spec.dnsNames)
        for one in kinds(objects, "Certificate")
    }
    for service in kinds(objects, "Service"):
        called = service["metadata"]["name"]
        if called != "learner":  # its Service names pods for Prometheus; it is not called over TLS
            assert {called, f"{called}.penstock.svc"} - names[called] == set()
    words = " ".join(word for _, container in all_containers(objects) for word in container.get("args", ()))
    assert set(re.findall(r"dns:///([a-z]+):", words)) == {"broker"}


@of_overlays
def test_grace_periods_hold_the_drain(objects: tuple[Object, ...], tmp_path: Path) -> None:
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


@pytest.mark.parametrize("name", ["kubernetes.md"], indirect=True)
def test_the_overlay_on_the_page_makes_the_described_changes(
    objects: tuple[Object, ...], tmp_path: Path
) -> None:
    assert "redis" not in [workload.name for workload in workloads(objects)]
    assert "Service/redis" not in map(name_of, objects)
    addresses = [one["data"]["REDIS"] for one in kinds(objects, "ConfigMap") if "REDIS" in one["data"]]
    assert addresses == ["redis.example:6379"]
    assert _configuration(objects, tmp_path).run == "mine"
    images = {container["image"] for _, container in all_containers(objects)}
    assert {"registry.example/penstock-actor:0.1.0", "penstock-learner:0.1.0-cuda"} <= images
    (to_redis,) = [one for one in kinds(objects, "NetworkPolicy") if one["metadata"]["name"] == "to-redis"]
    assert to_redis["spec"]["egress"][0]["to"] == [{"ipBlock": {"cidr": "192.0.2.7/32"}}]
    assert _learner(objects).spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"


def _learner(objects: tuple[Object, ...]) -> Workload:
    (found,) = [workload for workload in workloads(objects) if workload.name == "learner"]
    return found


def test_two_cores_are_enough_for_the_component_of_two_cores(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    two_cores = render(with_components(tmp_path / "two", "two-cores"))
    for objects, said in ((overlay("local"), "4.4"), (two_cores, "1.3")):
        requests = [
            workload.replicas * _cores(container["resources"]["requests"]["cpu"])
            for workload in workloads(objects)
            for container in workload.spec["containers"]
        ]
        assert f"{sum(requests):.1f}" == said
        assert f"{said} " in page


def _cores(quantity: str) -> float:
    return float(quantity.removesuffix("m")) / 1000 if quantity.endswith("m") else float(quantity)


@of_ranks
def test_torchrun_starts_the_same_learner_in_every_pod(objects: tuple[Object, ...]) -> None:
    workload = _learner(objects)
    (container,) = workload.spec["containers"]
    environment = {one["name"]: one.get("value", "of a secret") for one in container["env"]}
    assert int(environment["PODS"]) == workload.replicas == 3
    assert environment["RANKS_PER_POD"] == container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    words = [re.sub(r"\$\((\w+)\)", lambda name: environment[name[1]], word) for word in container["args"]]
    given = get_args_parser().parse_args(words)
    assert (given.nnodes, given.nproc_per_node, given.rdzv_backend) == ("3", "2", "c10d")
    assert given.no_python
    assert given.shutdown_timeout < workload.spec["terminationGracePeriodSeconds"]
    assert (container["command"], given.training_script) == (["torchrun"], "penstock")
    assert environment["PENSTOCK_LEARNER__PLAINTEXT_RANKS"] == "true"
    check_command({**container, "command": ["penstock"], "args": given.training_script_args})
    assert {"--resume", "--stay"} <= set(given.training_script_args)


@of_ranks
def test_ranks_find_one_another_before_they_are_ready(objects: tuple[Object, ...]) -> None:
    (container,) = _learner(objects).spec["containers"]
    assert "--rdzv-endpoint=learner-0.learner:29400" in container["args"]
    (service,) = [one for one in kinds(objects, "Service") if one["metadata"]["name"] == "learner"]
    assert service["spec"]["publishNotReadyAddresses"] is True


@of_ranks
def test_only_ranks_talk_to_ranks(objects: tuple[Object, ...]) -> None:
    labels = _learner(objects).labels
    for policy in kinds(objects, "NetworkPolicy"):
        if policy["metadata"]["name"] == "ranks":
            (inside,), (outside,) = policy["spec"]["ingress"], policy["spec"]["egress"]
            peer = {"podSelector": {"matchLabels": {COMPONENT: "learner"}}}
            assert [*inside["from"], *outside["to"]] == [peer, peer]
        elif selects(policy["spec"]["podSelector"], labels) and policy["spec"].get("ingress"):
            assert policy["metadata"]["name"] == "metrics"


def scaled_object() -> Object:
    (found,) = kinds(overlay("production"), "ScaledObject")
    return dict(found["spec"])


def series(actors: int, *, actor_waits: float, learner_waits: float | None) -> list[dict[str, str]]:
    """Five minutes, scraped every 15 s.

    Shares of their time in which actors wait for credit, the learner for a batch.
    """

    def rising(name: str, per_second: float, **labels: str) -> dict[str, str]:
        said = ",".join(f'{label}="{value}"' for label, value in labels.items())
        return {"series": f"{name}{{{said}}}", "values": f"0+{per_second * 15:g}x20"}

    found = [
        # Another run that the same Prometheus watches: starved, and none of our business.
        rising("penstock_learner_wait_seconds_total", 1.0, run="other"),
        rising("penstock_cpu_seconds_total", 1.0, run="other", role="actor", instance="x"),
    ]
    for number in range(actors):
        own = {"run": RUN, "instance": f"actor-{number}"}
        found.append(rising("penstock_cpu_seconds_total", 1.0, role="actor", **own))
        found.append(rising("penstock_actor_wait_seconds_total", actor_waits, cause="leave", **own))
    if learner_waits is not None:
        found.append(rising("penstock_learner_wait_seconds_total", learner_waits, run=RUN))
    return found


@pytest.mark.promise("starved-learner-gets-actors")
@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool on PATH (Debian: prometheus)")
@pytest.mark.parametrize(
    ("actors", "actor_waits", "learner_waits", "wanted"),
    [
        pytest.param(2, 0.0, 0.75, 8.0, id="a starved learner gets more actors"),
        pytest.param(8, 0.75, 0.0, 2.0, id="a saturated learner gives actors back"),
        pytest.param(4, 0.5, 0.5, 4.0, id="where both wait in turns more actors would only wait"),
        pytest.param(2, 1.0, None, None, id="without a learner there is no answer"),
    ],
)
def test_prometheus_computes_how_many_actors_a_learner_needs(
    actors: int, actor_waits: float, learner_waits: float | None, wanted: float | None, tmp_path: Path
) -> None:
    (trigger,) = scaled_object()["triggers"]
    query = trigger["metadata"]["query"]
    samples = [] if wanted is None else [{"labels": query.replace("'", '"'), "value": wanted}]
    given = series(actors, actor_waits=actor_waits, learner_waits=learner_waits)
    case = {"expr": query, "eval_time": "5m", "exp_samples": samples}
    test = {"interval": "15s", "input_series": given, "promql_expr_test": [case]}
    path, rules = tmp_path / "case.yml", str(ROOT / "deploy" / "prometheus" / "rules.yml")
    path.write_text(yaml.safe_dump({"rule_files": [rules], "tests": [test], "evaluation_interval": "15s"}))
    done = subprocess.run(
        ["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_an_answer_the_number_of_actors_stays() -> None:
    (trigger,) = scaled_object()["triggers"]
    assert trigger["metadata"]["ignoreNullValues"] == "false"
    assert (trigger["metricType"], trigger["metadata"]["threshold"]) == ("AverageValue", "1")


def test_actors_leave_one_by_one_and_have_time_to_flush() -> None:
    rules = scaled_object()["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    (down,) = rules["scaleDown"]["policies"]
    target = scaled_object()["scaleTargetRef"]["name"]
    (actor,) = [one for one in workloads(overlay("production")) if one.name == target]
    assert (down["type"], down["value"]) == ("Pods", 1)
    assert down["periodSeconds"] > actor.spec["terminationGracePeriodSeconds"]
    assert rules["scaleDown"]["stabilizationWindowSeconds"] > rules["scaleUp"]["stabilizationWindowSeconds"]


def test_scalers_own_the_replica_counts_that_they_set() -> None:
    objects = overlay("production")
    targets = {scaled_object()["scaleTargetRef"]["name"]}
    targets |= {one["spec"]["scaleTargetRef"]["name"] for one in kinds(objects, "HorizontalPodAutoscaler")}
    for one in kinds(objects, "Deployment"):
        assert ("replicas" in one["spec"]) == (one["metadata"]["name"] not in targets)
