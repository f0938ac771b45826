"""The acting part of a policy: observations in, actions out, with weights that are loaded.

Observations and actions are dictionaries by the paths of `penstock.protocol.spaces.leaves`:
"observation", "observation/camera", "action", "action/0". An action is stored and sent as it was
drawn (index from 0, unclipped Gaussian, unsquashed Gaussian); `environment_action` converts it for the
environment. A row may also hold action masks (`mask/action`, bool, true where allowed) and the policy's state
(`state/…`); without them every action is allowed, and the state is that at the begin of an episode. Nothing
here blocks or does I/O; a policy is used by one thread.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.policy.acting.drawing import Drawing, ExplorationSlots, Reals
from penstock.protocol.schema import choices
from penstock.protocol.spaces import Space, leaves, unflatten
from penstock.protocol.tensor import Array, all_finite

_NOT_FINITE: Final = "policy: the network's outputs are not finite; check observation and weights"


@dataclass(slots=True)
class Acted:
    """The actions of one forward pass. Not frozen, as `Step`, because each pass creates them.

    action: by path, [N, *shape] in the dtype of its leaf, as drawn. log_prob: float32 [N], joint.

    state: after this step, by path, [N, ...]; new arrays.
    """

    action: dict[str, Array]
    log_prob: NDArray[np.float32]
    state: Mapping[str, Array] = field(default_factory=dict)


@dataclass(slots=True)
class Step:
    """parameters: [N, P], of the action distributions. state: after this step, by path, [N, ...]."""

    parameters: Reals
    state: Mapping[str, Array]


class ActingPolicy(ABC):
    """Draws actions from the outputs of `step`, with their log-probabilities."""

    def _draw_with(
        self, action_space: Space, drawings: Sequence[Drawing], cuts: Sequence[slice], seed: int
    ) -> None:
        self._drawn_space, self._drawings, self._drawn_cuts = action_space, tuple(drawings), tuple(cuts)
        self._random = np.random.default_rng(seed)
        masked = [path for path, leaf in leaves(action_space, "action") if choices(leaf)]
        self._mask_names = [(path, f"mask/{path}") for path in masked]

    @abstractmethod
    def load(self, blob: bytes) -> None:
        """Act with these weights from now on, all or none of them.

        Raises ValueError that names the tensor when names, shapes or dtypes are not this policy's.
        """

    @abstractmethod
    def step(self, row: Mapping[str, Array]) -> Step:
        """Return the parameters of the action distributions, and the state after the step; no gradients.

        row: observation, masks and state by path, [N, ...].
        """

    @abstractmethod
    def initial_state(self, count: int) -> dict[str, Array]:
        """Return the state in which an episode begins, by path, [count, ...]: zeros."""

    @abstractmethod
    def use_threads(self, count: int) -> None:
        """Let forward passes of this process take so many threads."""

    def seed_actions(self, seed: int) -> None:
        """Seed the generator of the actions, which is not part of the weights."""
        self._random = np.random.default_rng(seed)

    @property
    def chooses_by_value(self) -> bool:
        """Whether actions are chosen by their values, so that probabilities describe only exploration."""
        return any(head.chooses_by_value for head in self._drawings)

    def explore(self, scalars: Mapping[str, float], place: ExplorationSlots) -> None:
        """Set the exploration by scalars that came with the weights. place: the slots of this policy."""
        for head in self._drawings:
            head.explore(scalars, place)

    def act(self, observation: Mapping[str, Array], *, deterministic: bool = False) -> Acted:
        """Draw one action per row; the mode where `deterministic`.

        observation: by path, [N, *shape], raw, in the dtype of the leaf. N may change between calls.
        The returned arrays are new. Uses the present weights, no gradients.
        """
        step = self.step(observation)
        masks = self._given_masks(observation)
        acted = self.choose(step.parameters, self._random, deterministic=deterministic, masks=masks)
        return replace(acted, state=step.state) if step.state else acted

    def choose(
        self,
        parameters: Reals,
        random: np.random.Generator,
        *,
        deterministic: bool = False,
        masks: Mapping[str, NDArray[np.bool_]] | None = None,
    ) -> Acted:
        """Draw one action per row of `parameters` [N, P]; the mode where `deterministic`.

        masks: bool [N, size] by path, true where allowed, for leaves that choose one of n.
        Raises FloatingPointError for parameters that are not finite.
        """
        _check_finite(parameters)
        actions: dict[str, Array] = {}
        log_probs: list[Any] = []
        for head, part in self._parts(parameters, masks):
            actions[head.path], head_log_prob = head.mode(part) if deterministic else head.draw(part, random)
            log_probs.append(head_log_prob)
        log_prob = log_probs[0] if len(log_probs) == 1 else np.sum(log_probs, 0)
        return Acted(actions, log_prob.astype(np.float32, copy=False))

    def chance(
        self,
        parameters: Reals,
        action: Mapping[str, Array],
        masks: Mapping[str, NDArray[np.bool_]] | None = None,
    ) -> NDArray[np.float32]:
        """Return the joint log-probability float32 [N] with which `choose` draws these actions, as drawn.

        Arguments and error are those of `choose`.
        """
        _check_finite(parameters)
        return _joint(head.chance(part, action[head.path]) for head, part in self._parts(parameters, masks))

    def acting_log_prob(
        self, observation: Mapping[str, Array], action: Mapping[str, Array]
    ) -> NDArray[np.float32]:
        """Return the log-probability float32 [N] of stored actions for the probe of the run.

        observation, action: [N, *shape] by path. Computed from the same outputs as `act`.
        """
        parameters, masks = self.step(observation).parameters, self._given_masks(observation)
        parts = self._parts(parameters, masks)
        return _joint(head.probe_log_prob(part, action[head.path]) for head, part in parts)

    def distribution(
        self, parameters: Reals, masks: Mapping[str, NDArray[np.bool_]] | None = None
    ) -> dict[str, Reals]:
        """Return the distribution from which actions are drawn, by the path of the action and its figure.

        An example is "action/probability" [N, n]. parameters: outputs of the network, [N, P]. masks: what is
        allowed, bool [N, n] by path of the action; None: everything.
        """
        described: dict[str, Reals] = {}
        for head, part in self._parts(parameters, masks):
            described |= {f"{head.path}/{name}": array for name, array in head.describe(part).items()}
        return described

    def environment_action(self, action: Mapping[str, Array]) -> Any:
        """Convert stored actions [N, *shape] to the form of `VectorEnv.step`: offset, clipped, scaled."""
        ready = {head.path: head.to_environment(action[head.path]) for head in self._drawings}
        return unflatten(self._drawn_space, ready, "action")

    def _given_masks(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {path: row[name] for path, name in self._mask_names if name in row}

    def _parts(
        self, parameters: Reals, masks: Mapping[str, NDArray[np.bool_]] | None
    ) -> Iterator[tuple[Drawing, Reals]]:
        """Yield each leaf's drawing with its part of parameters [N, P], masked."""
        for head, cut in zip(self._drawings, self._drawn_cuts, strict=True):
            part, mask = parameters[:, cut], None if masks is None else masks.get(head.path)
            yield head, part if mask is None else head.masked(part, mask)


def _joint(log_probs: Iterable[Any]) -> NDArray[np.float32]:
    joint: NDArray[np.float32] = np.sum([*log_probs], 0).astype(np.float32, copy=False)
    return joint


def _check_finite(parameters: Reals) -> None:
    if not all_finite(parameters):
        raise FloatingPointError(_NOT_FINITE)


def begun(state: Mapping[str, Array], begins: NDArray[np.bool_] | None) -> dict[str, Array]:
    """Return state [N, ...] with zeros where an episode begins; begins: bool [N], None: nowhere."""
    if begins is None or not state:
        return dict(state)
    fresh = {path: array.copy() for path, array in state.items()}
    for array in fresh.values():
        array[begins] = 0
    return fresh
