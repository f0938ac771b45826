"""The local overlay on a real cluster: from nothing to a solved CartPole, and what people do to it then.

One installation for all: each test leaves it learning, with all its pods ready. A client of the policy server
calls from a pod of its own all the time. The books balance after each.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from tests.deploy.manifests import Object
from tests.kubernetes.bare_pod import BarePod, PolicyCaller
from tests.kubernetes.cluster import Cluster, KubectlError, eventually, ready
from tests.kubernetes.installation import RUN, Installation
from tests.kubernetes.timeline import watcher

ENDLESS: Final = RUN + "\n[learner]\ntotal_steps = 1000000000\nstop_at_target = false\n"
PODS: Final = {"redis": 1, "registry": 1, "broker": 2, "learner": 1, "actor": 2, "evaluator": 1, "server": 1}
MEASURED: Final = ("redis", "broker", "learner", "actor", "evaluator", "server")
"""Components whose pods have one process that matters."""
ALL: Final = (
    *("statefulset/redis", "statefulset/registry", "deployment/broker", "statefulset/learner"),
    *("deployment/actor", "deployment/evaluator", "deployment/server"),
)


@pytest.fixture(scope="module")
def installation(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    made = Installation(cluster, tmp_path_factory.mktemp("local"), "local", "two-cores")
    try:
        yield made
        print(made.describe())
    finally:
        made.remove()


@pytest.fixture(scope="module")
def solved(installation: Installation) -> dict[str, Any]:
    installation.apply()
    installation.finish_rollout(*ALL)

    def look() -> dict[str, Any] | None:
        try:
            told: dict[str, Any] = json.loads(
                installation.read("learner-0", "/var/lib/penstock/run/learner.json")
            )
        except KubectlError:  # it is not written yet
            return None
        return told

    return eventually("a learner that has ended", look)


@pytest.fixture(scope="module")
def endless(installation: Installation, solved: dict[str, Any]) -> Installation:
    assert solved["solved"]
    installation.write(installation.cluster.tags[0], ENDLESS)
    installation.apply()
    installation.finish_rollout(*ALL)
    return installation


@pytest.fixture(scope="module")
def caller(endless: Installation) -> PolicyCaller:
    made = PolicyCaller(endless)
    made.start()
    eventually("an answer of the policy server", lambda: made.told()["answers"] > 0 or None)
    return made


@pytest.fixture
def running(endless: Installation, caller: PolicyCaller) -> Iterator[Installation]:
    """It learns before and after a test, every pod is ready, nothing is lost, the client is answered."""
    wait_until_it_learns(endless)
    answers = caller.told()["answers"]
    yield endless
    for component, count in PODS.items():
        endless.wait_for_pods(component, count)
    wait_until_it_learns(endless)
    check_books(endless)
    eventually("more answers", lambda: caller.told()["answers"] > answers + 10 or None)


def wait_until_it_learns(installation: Installation) -> None:
    before = version(installation.status())
    eventually("ten more versions", lambda: version(installation.status()) > before + 10 or None)


def version(status: dict[str, Any]) -> int:
    return int(status["latest"]["version"])


def check_books(installation: Installation) -> None:
    """No fragment is booked twice; that none is missing is seen at the end."""
    status = installation.status()
    ledger = status["learner"]["ledger"]
    assert ledger["trained"] + sum(ledger["dropped"].values()) <= int(status["acked"]), status


def test_from_nothing_to_a_solved_cartpole(solved: dict[str, Any], installation: Installation) -> None:
    assert solved["solved"]
    assert solved["ledger"]["balanced"], solved["ledger"]
    for component, count in PODS.items():
        pods = installation.wait_for_pods(component, count)
        assert [one["restartCount"] for pod in pods for one in pod["status"]["containerStatuses"]] == [
            0
        ] * count


def test_applying_twice_changes_nothing(running: Installation) -> None:
    eventually("no Job", lambda: no_job(running))
    before = names(running)
    made = certificate(running)
    running.apply()
    running.kubectl("wait", "--for=condition=complete", "job/certificates", "--timeout=300s")
    assert names(running) == before
    assert certificate(running) == made
    assert "they are made" in running.log("job/certificates")


def certificate(installation: Installation) -> str:
    return installation.kubectl("exec", "deployment/broker", "--", "cat", "/certificates/own.pem")


def no_job(installation: Installation) -> bool | None:
    return None if installation.kubectl("get", "jobs", "--output=name").strip() else True


def names(installation: Installation) -> set[str]:
    return {pod["metadata"]["name"] for component in PODS for pod in installation.pods(component)}


def test_one_of_two_brokers_may_be_evicted(running: Installation) -> None:
    first, second = (pod["metadata"]["name"] for pod in running.wait_for_pods("broker", 2))
    evict(running, first)
    with pytest.raises(KubectlError, match="disruption budget"):
        evict(running, second)
    running.wait_for_pods("broker", 2)
    evict(running, second)


def evict(installation: Installation, pod: str) -> None:
    told = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
    path = f"/api/v1/namespaces/{installation.namespace}/pods/{pod}/eviction"
    installation.kubectl("create", "--raw", path, "--filename=-", given=json.dumps(told))


def test_a_learner_deleted_without_grace_returns(running: Installation) -> None:
    before = running.status()
    replace(running, "learner-0", "--force", "--grace-period=0")
    after = eventually("a newer epoch", lambda: newer(running, int(before["epoch"])))
    assert int(after["acked"]) >= int(before["acked"])
    log = running.log("learner-0")
    assert "checkpoint" in log, log[-2000:]


def newer(installation: Installation, epoch: int) -> dict[str, Any] | None:
    told = installation.status()
    return told if int(told["epoch"]) > epoch else None


def replace(installation: Installation, pod: str, *words: str) -> None:
    (before,) = installation.pods(pod.rpartition("-")[0])
    installation.kubectl("delete", "pod", pod, *words)

    def look() -> Object | None:
        there = installation.pods(pod.rpartition("-")[0])
        return next((one for one in there if new(one) and ready(one)), None)

    def new(one: Object) -> bool:
        return bool(one["metadata"]["uid"] != before["metadata"]["uid"])

    eventually(f"another {pod}", look)


def test_redis_stops_and_returns(running: Installation) -> None:
    before = int(running.status()["acked"])
    replace(running, "redis-0")
    after = eventually("a broker that knows more", lambda: acked_since(running, before))
    assert after > before


def acked_since(installation: Installation, before: int) -> int | None:
    acked = int(installation.status()["acked"])
    return acked if acked > before else None


def test_actors_are_scaled_up_and_down(running: Installation) -> None:
    for count in (1, 8, 2):
        running.kubectl("scale", "deployment/actor", f"--replicas={count}")
        running.wait_for_pods("actor", count)
        eventually(f"{count} sessions", partial(sessions, running, count))


def sessions(installation: Installation, count: int) -> bool | None:
    rollout = [one for one in installation.status()["sessions"] if one["role"] == "rollout"]
    return True if len(rollout) == count and all(int(one["sequence"]) > 0 for one in rollout) else None


def test_a_process_takes_no_more_memory_than_is_reserved_for_it(running: Installation) -> None:
    before = {component: first_process(running, component) for component in MEASURED}
    began = time.monotonic()
    wait_until_it_learns(running)
    seconds = time.monotonic() - began
    for component, (cpu_s, _, _) in before.items():
        later, resident, requested = first_process(running, component)
        cores = (later - cpu_s) / seconds
        print(f"{component}: {resident >> 20} MiB of {requested >> 20} MiB, {cores:.2f} cores")
        assert resident <= requested, component


def first_process(installation: Installation, component: str) -> tuple[float, int, int]:
    pod = installation.pods(component)[0]
    looks = ["cat", "/proc/1/stat", "/proc/1/status"]
    stat, _, status = installation.kubectl("exec", pod["metadata"]["name"], "--", *looks).partition("\n")
    fields = stat.rpartition(")")[2].split()
    (resident,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))
    requested = pod["spec"]["containers"][0]["resources"]["requests"]["memory"]
    units = {"Mi": 2**20, "Gi": 2**30}
    return (
        (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
        resident * 1024,
        int(requested[:-2]) * units[requested[-2:]],
    )


def test_an_upgrade_under_load(running: Installation, caller: PolicyCaller) -> None:
    _, new = running.cluster.tags
    before = running.status()
    running.write(new, ENDLESS)
    eventually("no Job", lambda: no_job(running))
    watching = watcher(running)
    watching.start()
    eventually("ten looks", lambda: len(watching.lines()) >= 10 or None)
    marks = {"applied": time.time()}
    running.apply()
    for part in ALL:
        running.finish_rollout(part)
        marks[part.partition("/")[2]] = time.time()
    eventually("it learns again", lambda: learned(watching, 10))
    keep_timeline(watching.lines(), marks)
    watching.remove()
    pods = [pod for component, count in PODS.items() for pod in running.wait_for_pods(component, count)]
    images = {one["image"] for pod in pods for one in pod["spec"]["containers"]}
    tags = {image.rpartition(":")[2] for image in images if "penstock-" in image}
    assert tags == {new}, images
    assert int(running.status()["acked"]) > int(before["acked"])
    told = caller.told()
    assert told["since_s"] < 60.0, told


def learned(watching: BarePod, versions: int) -> bool | None:
    """Whether the newest looks, ten seconds of them, show so many versions more."""
    newest = [row["version"] for row in watching.lines()[-10:] if "version" in row]
    return True if newest and newest[-1] >= newest[0] + versions else None


def keep_timeline(rows: list[dict[str, Any]], marks: dict[str, float]) -> None:
    if file := os.environ.get("PENSTOCK_KUBERNETES_TIMELINE"):
        Path(file).write_text(json.dumps({"rows": rows, "marks": marks}))


def test_a_node_is_drained(running: Installation) -> None:
    if "KUBECONFIG" in os.environ:
        pytest.skip("drains a node: on a cluster of the tests' own only")
    (node,) = running.cluster.get("nodes")["items"]
    name, ours = node["metadata"]["name"], "--pod-selector=app.kubernetes.io/part-of=penstock"
    words = ("--ignore-daemonsets", "--delete-emptydir-data", ours, "--timeout=120s")
    said = running.cluster.kubectl("drain", name, *words, check=False)
    kept = [one["metadata"]["name"] for one in running.pods("broker") if one["status"]["phase"] == "Running"]
    learning = any(map(ready, running.pods("learner")))
    running.cluster.kubectl("uncordon", name)  # first of all: what comes after has need of it
    assert "disruption budget" in said, said
    assert len(kept) == 1, kept
    assert not learning
    running.finish_rollout(*ALL)


def test_certificates_and_passwords_are_renewed(running: Installation) -> None:
    made = certificate(running)
    running.status()  # the operator is there
    running.kubectl("exec", "deployment/operator", "--", "rm", "/made/all")
    running.kubectl("delete", "job", "certificates", "--ignore-not-found")
    running.apply()
    running.kubectl("rollout", "restart", "statefulset,deployment")
    running.finish_rollout(*ALL)
    assert certificate(running) != made


def test_an_unknown_setting_is_named_in_the_logs(running: Installation) -> None:
    running.write(running.cluster.tags[1], ENDLESS.replace("total_steps", "total_step"))
    running.apply()
    eventually("an error in the log of the learner", lambda: told(running, "total_step"))
    running.write(running.cluster.tags[1], ENDLESS)
    running.apply()
    running.finish_rollout(*ALL)


def told(installation: Installation, word: str) -> bool | None:
    """Whether the learner's newest container, or the one before it, has named a word."""
    looks: tuple[Callable[[], str], ...] = (
        lambda: installation.log("learner-0", "--tail=50"),
        lambda: installation.log("learner-0", "--tail=50", "--previous"),
    )
    for look in looks:
        try:
            if f"{word}:" in look() or f"'{word}'" in look() or f"{word} " in look():
                return True
        except KubectlError:
            continue
    return None


def test_the_books_balance_after_all_of_this(endless: Installation) -> None:
    endless.status()  # the operator is there
    words = ["penstock", "control", "stop", "broker:50051", "--config=/etc/penstock/run.toml"]
    endless.kubectl("exec", "deployment/operator", "--", *words)

    def ledger() -> dict[str, Any] | None:
        told = json.loads(endless.read("learner-0", "/var/lib/penstock/run/learner.json"))
        return dict(told["ledger"]) if told["ending"] != "target" else None

    found = eventually("the end of the run", ledger)
    assert found["balanced"], found
