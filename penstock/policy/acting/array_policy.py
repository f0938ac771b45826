"""A policy in numpy alone, for networks that are a chain of linear layers: it acts, and cannot be trained.

It takes the weights of the `penstock.policy.policy.Policy` of the same spaces and section, and draws the same
actions from the same seeds.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from penstock.config.settings import PolicySection
from penstock.policy.acting.acting_policy import ActingPolicy, Step
from penstock.policy.acting.drawing import Drawing
from penstock.policy.acting.forward import ACTIVATIONS, Activation, Linear, NumpyForward, NumpyNormaliser
from penstock.policy.acting.input_layout import InputLayout
from penstock.policy.acting.leaf_heads import DRAWINGS
from penstock.policy.weight_blob import Form, fitting
from penstock.protocol.spaces import Space, leaves
from penstock.protocol.tensor import Array

_NO_STATE: Final[dict[str, Array]] = {}


def is_enough(observation_space: Space, section: PolicySection) -> bool:
    """Return whether a policy of this section acts by a chain of linear layers and remembers nothing."""
    return (
        not section.network
        and not section.kwargs
        and section.hidden_norm == "none"
        and section.recurrent == "none"
        and section.frame_stack == 1
        and not InputLayout(observation_space).images
    )


class ArrayPolicy(ActingPolicy):
    """Acts once its weights are loaded.

    Raises ValueError that names field and space when a space cannot be handled.
    """

    def __init__(
        self, observation_space: Space, action_space: Space, section: PolicySection, seed: int
    ) -> None:
        heads = [DRAWINGS.of_leaf(path, leaf, section) for path, leaf in leaves(action_space, "action")]
        ends = np.cumsum([head.size for head in heads]).tolist()
        cuts = [slice(end - head.size, end) for head, end in zip(heads, ends, strict=True)]
        self._draw_with(action_space, heads, cuts, seed)
        self._layout, self._section = InputLayout(observation_space), section
        self._forms = dict(_forms(self._layout, heads, section))
        self._forward: NumpyForward | None = None

    def initial_state(self, count: int) -> dict[str, Array]:
        """Return {}, in place of arrays [count, ...]: a row's outputs depend on the row alone."""
        return {}

    def use_threads(self, count: int) -> None:
        """Leave it as it is: the environment of the process says how many numpy takes."""

    def load(self, blob: bytes) -> None:
        """Act with these weights from now on; see `ActingPolicy.load`."""
        arrays = fitting(blob, self._forms)
        for index, head in enumerate(self._drawings):
            for name, own in head.own_weights().items():
                own[...] = arrays[f"heads.{index}.{name}"]
        self._forward = NumpyForward(self._layout, self._normaliser(arrays), list(self._layers(arrays)))

    def step(self, row: Mapping[str, Array]) -> Step:
        """Return the network's outputs, float32 [N, size]; row: arrays [N, ...] by path.

        Raises RuntimeError before any weights.
        """
        if self._forward is None:
            raise RuntimeError("this policy acts once weights are loaded")
        return Step(self._forward(row), _NO_STATE)

    def _normaliser(self, arrays: Mapping[str, Any]) -> NumpyNormaliser | None:
        if "reader.normaliser.mean" not in arrays:
            return None
        mean, variance = arrays["reader.normaliser.mean"], arrays["reader.normaliser.variance"]
        return NumpyNormaliser(mean, variance, self._section.observation_clip)

    def _layers(self, arrays: Mapping[str, Array]) -> Iterator[Linear | Activation]:
        for name in _hidden_names("actor_body", self._section):
            yield _linear(arrays, name)
            yield ACTIVATIONS[self._section.activation]
        yield _linear(arrays, "actor_head")


def _linear(arrays: Mapping[str, Any], name: str) -> Linear:
    return arrays[f"{name}.weight"].T, arrays[f"{name}.bias"]


def _hidden_names(body: str, section: PolicySection) -> list[str]:
    """Return the names of a body's linear layers; the activation and the dropout stand between them."""
    stride = 3 if section.dropout > 0 else 2
    return [f"{body}.layers.{stride * index}" for index in range(len(section.hidden_sizes))]


def _forms(
    layout: InputLayout, heads: Sequence[Drawing], section: PolicySection
) -> Iterator[tuple[str, Form]]:
    """Yield name and form of every tensor that the learner's module publishes, its critic's among them."""
    if section.normalise_observations and layout.reals_width:
        yield "reader.normaliser.count", ("float64", ())
        yield "reader.normaliser.mean", ("float64", (layout.reals_width,))
        yield "reader.normaliser.variance", ("float64", (layout.reals_width,))
    for index, head in enumerate(heads):
        for name, own in head.own_weights().items():
            yield f"heads.{index}.{name}", (own.dtype.name, own.shape)
    for body in ("actor_body",) if section.shared_trunk else ("actor_body", "critic_body"):
        before = layout.width
        for name, after in zip(_hidden_names(body, section), section.hidden_sizes, strict=True):
            yield from _linear_forms(name, before, after)
            before = after
    before = section.hidden_sizes[-1] if section.hidden_sizes else layout.width
    yield from _linear_forms("actor_head", before, sum(head.size for head in heads))
    yield from _linear_forms("critic_head", before, 1)


def _linear_forms(name: str, before: int, after: int) -> Iterator[tuple[str, Form]]:
    yield f"{name}.weight", ("float32", (after, before))
    yield f"{name}.bias", ("float32", (after,))
