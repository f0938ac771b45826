"""Policies of every kind of space, to be exported: spaces, observations, weights that are not the first."""

from typing import Any

import numpy as np
import torch

from penstock.config.settings import PolicySection
from penstock.policy.networks import BatchNorm
from penstock.policy.policy import Policy, build
from penstock.protocol.schema import choices
from penstock.protocol.spaces import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    Tuple,
    flatten,
    leaves,
)
from penstock.protocol.tensor import Array

VECTOR = Box(np.full(4, -1, np.float32), np.full(4, 1, np.float32))
REACH = Box(np.array([-2, -1], np.float32), np.array([2, 3], np.float32))
IMAGE = Box(np.zeros((12, 12, 3), np.uint8), np.full((12, 12, 3), 255, np.uint8))
MIXED = Dict(
    (
        ("bits", MultiBinary(3)),
        ("camera", IMAGE),
        ("choice", Discrete(4, start=1)),
        ("gears", MultiDiscrete((2, 3))),
        ("joints", VECTOR),
    )
)
CASES: dict[str, tuple[Space, Space, PolicySection]] = {
    "choices": (VECTOR, MultiDiscrete((3, 2)), PolicySection()),
    "a choice that begins elsewhere, of a dictionary": (MIXED, Discrete(3, start=-1), PolicySection()),
    "values of choices": (
        VECTOR,
        Discrete(4, start=2),
        PolicySection(discrete="epsilon_greedy", dueling=True),
    ),
    "bits": (VECTOR, MultiBinary(3), PolicySection()),
    "clipped, with a bound that is not finite": (
        VECTOR,
        Box(np.array([[-1, -0.1]], np.float64), np.array([[np.inf, 0.1]], np.float64)),
        PolicySection(),
    ),
    "squashed, with a deviation for each state": (
        VECTOR,
        REACH,
        PolicySection(continuous="squashed", state_dependent_std=True),
    ),
    "a tuple of a dictionary": (
        Tuple((VECTOR, Discrete(3))),
        Tuple((Dict((("fire", Discrete(3)), ("steer", REACH))), MultiBinary(2))),
        PolicySection(),
    ),
    "a vector and a choice": (VECTOR, Discrete(2), PolicySection()),
    "normalised, continuous, squashed": (
        VECTOR,
        REACH,
        PolicySection(normalise_observations=True, continuous="squashed", activation="silu"),
    ),
    "parts of every kind": (
        MIXED,
        Dict((("fire", Discrete(3)), ("steer", Box(np.full(2, -1, np.float32), np.full(2, 1, np.float32))))),
        PolicySection(normalise_observations=True, shared_trunk=True),
    ),
    "every kind of layer": (
        Dict((("camera", IMAGE), ("arm", VECTOR))),
        Discrete(2),
        PolicySection(hidden_norm="batch", dropout=0.2, image_trunk="impala", shared_trunk=True),
    ),
    "a network of the user's": (
        VECTOR,
        Discrete(2),
        PolicySection(network="tests.support.experience.own_networks:Good", shared_trunk=True),
    ),
}


def observations(space: Space, rows: int) -> dict[str, Array]:
    generator = np.random.default_rng(rows)
    found: dict[str, Array] = {}
    for path, leaf in leaves(space, "observation"):
        shape = (rows, *leaf.shape)
        if isinstance(leaf, Box) and leaf.dtype != "uint8":
            values: Any = generator.normal(scale=2.0, size=shape)
        elif isinstance(leaf, Discrete):
            values = generator.integers(leaf.start, leaf.start + leaf.n, shape)
        else:
            values = generator.integers(0, 2 if not isinstance(leaf, Box) else 256, shape)
        found[path] = values.astype(leaf.dtype)
    return found


def trained(space: Space, action: Space, section: PolicySection) -> Policy:
    """A policy whose weights and statistics are not those of the start."""
    policy = build(space, action, section, seed=3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        if policy.normaliser is not None:
            policy.normaliser.mean.fill_(0.3)
            policy.normaliser.variance.fill_(2.5)
        for layer in policy.modules():
            if isinstance(layer, BatchNorm):
                layer.mean.fill_(0.2)
                layer.variance.fill_(0.5)
    return policy


def masks(action: Space, rows: int) -> dict[str, Any]:
    """Of every choice: about half is allowed, and one of each at least."""
    generator = np.random.default_rng(rows)
    found: dict[str, Any] = {}
    for path, leaf in leaves(action, "action"):
        sizes = leaf.nvec if isinstance(leaf, MultiDiscrete) else (choices(leaf),) if choices(leaf) else ()
        parts = [generator.random((rows, size)) < 0.5 for size in sizes]
        for part in parts:
            part[np.arange(rows), generator.integers(0, part.shape[1], rows)] = True
        if parts:
            found[f"mask/{path}"] = np.concatenate(parts, 1)
    return found


def deterministic(policy: Policy, row: dict[str, Array]) -> dict[str, Any]:
    """What the policy does when it does not draw, as an environment takes it, by path."""
    acted = policy.act(row, deterministic=True)
    return flatten(policy.action_space, policy.environment_action(acted.action), "action")
