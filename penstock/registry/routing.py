"""Choose the version that answers a client: the same on every server and after every restart.

The choice keeps no state. A client's key and the experiment's name are hashed to a number in [0, 1); the
shares cut that interval:

    0          canary_share                    1 − latest_share         1
    ├─ canary ─┼──────────── active ───────────┼──────── latest ────────┤

A growing share keeps its clients and gets others; changing one share does not move the clients of the other
one. An arm without a version is served by the next: canary → active → latest. Pure functions: no database, no
clock.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from penstock.registry.records import Traffic, UnknownVersion, check_client_key

LABEL: Final = "label:"
"""Prefix of a pin's key that is not a client's: the rest is a label of the version."""
_BITS: Final = 53
"""Bits of a float's mantissa: every position is below 1."""


class Arm(StrEnum):
    """The weights that a client follows."""

    LATEST = "latest"
    """The learner's newest weights: the only arm that is learned from."""
    ACTIVE = "active"
    CANARY = "canary"
    PINNED = "pinned"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arms:
    """The versions and the traffic of a policy at one moment."""

    traffic: Traffic
    active: int | None
    canary: int | None
    pinned: frozenset[int]
    """Versions whose weights are kept."""
    labels: Mapping[str, int] = field(default_factory=dict)
    """Version numbers by label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The version that answers, and the shadow version that also computes the answer, to be recorded."""

    arm: Arm
    version: int | None
    """None for `latest`: the version that is newest when the answer is computed."""
    shadow: int | None = None


def position(client_key: str, experiment: str) -> float:
    """Return a client's position in [0, 1) in an experiment; independent between experiments."""
    # An experiment's name holds no NUL, so that no two pairs are hashed as the same bytes.
    text = f"{experiment}\0{client_key}".encode("utf-8", "surrogatepass")
    digest = hashlib.sha256(text).digest()
    return (int.from_bytes(digest[:8]) >> (64 - _BITS)) / 2.0**_BITS


def route(arms: Arms, client_key: str) -> Route:
    """Return the route of a client; raises ValueError for a key that is empty or too long."""
    pin = arms.traffic.pins.get(check_client_key(client_key))
    if pin is not None and pin in arms.pinned:
        return Route(arm=Arm.PINNED, version=pin, shadow=_shadow(arms, pin))
    return follow(arms, assign(arms.traffic, client_key))


def assign(traffic: Traffic, client_key: str) -> Arm:
    """Return the arm that the shares assign to a client."""
    place = position(client_key, traffic.experiment)
    if place < traffic.canary_share:
        return Arm.CANARY
    # Not place >= 1 − share, which rounds: a share of 0 must reach no client and one of 1 all.
    return Arm.LATEST if 1.0 - place <= traffic.latest_share else Arm.ACTIVE


def follow(arms: Arms, arm: Arm) -> Route:
    """Return the route of an arm, also of one without a version."""
    if arm is Arm.CANARY and arms.canary is not None:
        return Route(arm=arm, version=arms.canary, shadow=_shadow(arms, arms.canary))
    if arm is not Arm.LATEST and arms.active is not None:
        return Route(arm=Arm.ACTIVE, version=arms.active, shadow=_shadow(arms, arms.active))
    return Route(arm=Arm.LATEST, version=None, shadow=_shadow(arms, None))


def exactly(arms: Arms, version: int) -> Route:
    """Return the route of a request for one version; raises UnknownVersion where it is not kept."""
    if version not in arms.pinned:
        held = ", ".join(map(str, sorted(arms.pinned))) or "none"
        raise UnknownVersion(f"version={version} of policy={arms.traffic.policy!r} is not held; held: {held}")
    return Route(arm=Arm.PINNED, version=version, shadow=_shadow(arms, version))


def labels(arms: Arms) -> dict[str, int]:
    """Return the versions with a label whose weights are kept, by label.

    A label in the traffic takes precedence over the same label in the registry.
    """
    given = {key.removeprefix(LABEL): one for key, one in arms.traffic.pins.items() if key.startswith(LABEL)}
    every = {**arms.labels, **given}
    return {label: version for label, version in sorted(every.items()) if version in arms.pinned}


def _shadow(arms: Arms, answering: int | None) -> int | None:
    """Return the shadow version, unless it is the answering version."""
    shadow = arms.traffic.shadow
    return shadow if shadow in arms.pinned and shadow != answering else None
