"""Actions when no version can answer: the one that the configuration names, or a uniform draw."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from penstock.config.settings import ConfigurationError, ServingSection
from penstock.protocol.refusal import Reason, Refusal, Refused
from penstock.protocol.spaces import Box, Discrete, Leaf, MultiBinary, MultiDiscrete, Space, flatten, leaves
from penstock.protocol.tensor import Array

Draw = Callable[[int], Mapping[str, Array]]
"""Actions for so many rows, by name, as the environment takes them."""


FALLBACKS: Final = ("", "previous", "fixed", "uniform")
"""Names of what can answer in place of the chosen version; "": that version itself."""


class Fallback:
    """The fallback of one server, as `serving.fallback` declares it."""

    def __init__(self, section: ServingSection, space: Space) -> None:
        """space: of actions. Raises ConfigurationError where the declared action is not in the space."""
        self.is_previous = section.fallback == "previous"
        """Whether the previous version answers first."""
        self._name = "uniform" if self.is_previous else section.fallback
        self._draw: Draw | None = None
        if self._name == "uniform":
            self._draw = uniform(space)
        elif self._name == "fixed":
            self._draw = fixed(space, section)

    def draw(self, rows: int) -> tuple[str, Mapping[str, Array]]:
        """Return its name and actions by name, [rows, *shape]; raises Refused (NOT_READY) without one."""
        if self._draw is None:
            text = "no version can answer, and serving.fallback=none"
            raise Refused(Refusal(reason=Reason.NOT_READY, detail=text, retry_after_ms=1000))
        return self._name, self._draw(rows)


def uniform(space: Space) -> Draw:
    """Draw uniformly from bounded leaves, and from a normal distribution where there are no bounds."""
    random = np.random.default_rng()
    every = list(leaves(space, "action"))

    def draw(rows: int) -> Mapping[str, Array]:
        return {name: _draw(leaf, rows, random).astype(leaf.dtype) for name, leaf in every}

    return draw


def fixed(space: Space, section: ServingSection) -> Draw:
    """Draw `serving.fallback_action`; raises ConfigurationError when it is not in the space."""
    given = section.fallback_action
    if given is None:
        raise ConfigurationError(
            "serving.fallback=fixed: name the action, --set serving.fallback_action=VALUE"
        )
    try:
        values = flatten(space, given, "action")
        single = {name: _value(leaf, values[name]) for name, leaf in leaves(space, "action")}
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise ConfigurationError(f"serving.fallback_action={given!r}: not in {space!r} ({error})") from error
    return lambda rows: {name: np.repeat(value[np.newaxis], rows, 0) for name, value in single.items()}


def _value(leaf: Leaf, given: Any) -> Array:
    value: Any = np.asarray(given, leaf.dtype)
    if not np.issubdtype(value.dtype, np.floating) and not np.array_equal(value, np.asarray(given)):
        raise ValueError(f"{leaf.dtype} is wanted")
    if value.shape != leaf.shape:
        raise ValueError(f"shape {value.shape}, {leaf.shape} is wanted")
    low, high = _bounds(leaf)
    if not ((value >= low) & (value <= high)).all():
        raise ValueError(f"{value.tolist()} lies outside")
    array: Array = value
    return array


def _bounds(leaf: Leaf) -> tuple[Any, Any]:
    """Lowest and highest values, both allowed."""
    match leaf:
        case Box():
            return leaf.low, leaf.high
        case Discrete():
            return leaf.start, leaf.start + leaf.n - 1
        case MultiDiscrete():
            return 0, np.asarray(leaf.nvec) - 1
        case MultiBinary():
            return 0, 1


def _draw(leaf: Leaf, rows: int, random: np.random.Generator) -> Any:
    low, high = _bounds(leaf)
    shape = (rows, *leaf.shape)
    if not isinstance(leaf, Box) or not leaf.dtype.startswith("float"):
        return random.integers(low, high, shape, endpoint=True)
    bounded = np.isfinite(low) & np.isfinite(high)
    with np.errstate(invalid="ignore"):
        inside = low + random.random(shape) * (high - low)
    return np.where(bounded, inside, np.clip(random.standard_normal(shape), low, high))
