"""What a Prometheus must have seen of a run on Kubernetes, as the node's report tells it."""

import re
import warnings
from collections.abc import Set as AbstractSet
from typing import Final

from tests.deploy.manifests import Object
from tests.deploy.quiet_panels import NOTHING_WRONG, OF_TEXT, Key, nowhere

NAMESPACE: Final = "penstock"
NOT_CAUSED: Final[dict[Key, str]] = {
    ("flow", "Repeated", "sent again {{run}}"): "no reply is lost",
    ("flow", "Refusals", "{{reason}} {{run}}"): "only where actors are there before the learner",
    ("flow", "Outboxes", "fullest {{run}}"): "acknowledged before the next look",
    ("flow", "Outboxes", "together {{run}}"): "as above",
    ("fleet", "Restarts", "{{role}} {{run}}"): "no process dies",
    ("fleet", "Out of reach", "{{run}}"): "a process that starts fast is there before its first scrape",
    ("fleet", "Sessions and retries", "retries {{run}}"): "the brokers stay",
    ("serving", "Shed and refused", "{{reason}} {{run}}"): "one client is no load",
    ("serving", "Evidence of a verdict", "{{cause}} {{run}}"): "no version is made the canary",
    ("serving", "Cost of the shadow", "processors {{run}}"): "no version is made the shadow",
    ("serving", "Agreement of the shadow", "{{run}}"): "no version is made the shadow",
    ("serving", "Late rewards", "{{run}}"): "the client's rewards come with its steps",
}
"""May be 0 or nothing in these runs, beside NOTHING_WRONG."""
OF_A_LAUNCHER: Final = {"penstock_restarts_total"}
"""Metrics of rules that are not there on Kubernetes, which starts processes itself."""
OF_A_GATEWAY: Final = "_gateway_"
"""Metrics of what the overlays that are watched do not have."""
BOARD_OF_A_GATEWAY: Final = "people"


def check_prometheus(told: Object, pods: AbstractSet[str]) -> None:
    """Every pod is a target, every rule works, every panel shows something.

    pods: that have a port for metrics.
    """
    if "absent" in told:
        warnings.warn(f"Prometheus was left out: {told['absent']}", stacklevel=2)
        return
    check_targets(told, pods)
    check_rules(told)
    check_panels(told)


def check_targets(told: Object, pods: AbstractSet[str]) -> None:
    """Each is up, and has the labels that the operator, the PodMonitor and the dashboards go by."""
    targets = {one["labels"]["pod"] for one in told["targets"]}
    assert targets == pods, targets ^ pods
    for one in told["targets"]:
        assert (one["health"], one["lastError"]) == ("up", ""), one
        pod, container = one["labels"]["pod"], one["labels"]["container"]
        assert one["labels"] == {
            "job": f"{NAMESPACE}/penstock",
            "namespace": NAMESPACE,
            "pod": pod,
            "container": container,
            "endpoint": "metrics",
            "app_kubernetes_io_component": container,
            "run": NAMESPACE,
            "instance": pod,
        }, one
    twice = [label for label in told["labels"] if label.startswith("exported_")]
    assert not twice, twice


def check_rules(told: Object) -> None:
    """None errs, each has what it asks for, what is recorded has values, and no alert fires."""
    rules = [rule for group in told["groups"] for rule in group["rules"]]
    assert {rule["type"] for rule in rules} == {"recording", "alerting"}, rules
    wrong = [rule for rule in rules if rule["health"] != "ok" or rule.get("lastError")]
    assert not wrong, wrong
    asked = {name for rule in rules for name in re.findall(r"penstock[_:]\w+", rule["query"])}
    recorded = {rule["name"] for rule in rules if rule["type"] == "recording"}
    there = OF_A_LAUNCHER | set(told["metrics"])
    unknown = {name for name in asked | recorded if name not in there and OF_A_GATEWAY not in name}
    assert not unknown, unknown
    firing = [rule for rule in rules if rule.get("state") == "firing"]
    assert not firing, firing


def check_panels(told: Object) -> None:
    """No query errs, and all find series with the labels of their legends.

    Every series is other than 0 at some time, except those in the lists of quiet panels.
    """
    quiet = NOTHING_WRONG | NOT_CAUSED | OF_TEXT
    assert not nowhere(quiet.keys()), nowhere(quiet.keys())
    assert told["runs"] == [NAMESPACE], told["runs"]  # what the dashboards' variable offers
    panels = [shown for shown in told["panels"] if shown["dashboard"] != BOARD_OF_A_GATEWAY]
    for shown in panels:
        assert shown["error"] == "", shown
        legend = set(re.findall(r"{{(\w+)}}", shown["legend"]))
        assert all(legend <= series["labels"].keys() for series in shown["series"]), shown
    seen = {_key(shown) for shown in panels if any(any(one["values"]) for one in shown["series"])}
    empty = {_key(shown) for shown in panels} - seen - quiet.keys()
    assert not empty, empty
    assert seen, "no dashboards"


def _key(shown: Object) -> Key:
    return shown["dashboard"], shown["title"], shown["legend"]
