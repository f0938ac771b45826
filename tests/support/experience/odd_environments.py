"""Environments as people write them: each keeps to Gymnasium's rules in an unusual way, or breaks one.

`ODD` names them; `odd:NAME-v0` is one of a run whose actors may import this module as `odd`.
"""

import multiprocessing
import os
import signal
import time
from typing import Any, ClassVar, Final

import gymnasium
import numpy as np
from gymnasium import spaces

STEPS: Final = 12
"""Length of an episode."""


class Odd(gymnasium.Env[Any, Any]):
    """A float to see and two choices, of which 1 pays; its subclasses change one thing each."""

    observation_space: Any = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space: Any = spaces.Discrete(2)

    def __init__(self) -> None:
        self.count = 0

    def shown(self) -> Any:
        return np.array([self.count / STEPS, 1.0], np.float32)

    def info(self) -> dict[str, Any]:
        return {}

    def paid(self, action: Any) -> Any:
        return float(np.asarray(action).reshape(-1)[0] > 0)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return self.shown(), self.info()

    def step(self, action: Any) -> Any:
        self.count += 1
        return self.shown(), self.paid(action), False, self.count == STEPS, self.info()


class RewardOfOneElement(Odd):
    def paid(self, action: Any) -> Any:
        return np.array([float(action)])


class RewardOfFloat16(Odd):
    def paid(self, action: Any) -> Any:
        return np.float16(action)


class WholeReward(Odd):
    def paid(self, action: Any) -> Any:
        return int(action)


class TruthInNumpy(Odd):
    def step(self, action: Any) -> Any:
        *rest, truncated, info = super().step(action)
        rest[2] = np.bool_(rest[2])
        return *rest, np.array(truncated), info


class InfosOfEveryKind(Odd):
    def info(self) -> dict[str, Any]:
        odd: list[Any] = [None, "a", {"a": None}, [1, 2], np.ones(self.count), {1, 2}, object(), 3]
        return {"winner": odd[self.count % len(odd)], "final_obs": "mine", "_winner": 1}


class ListsAsObservations(Odd):
    def shown(self) -> Any:
        return [self.count / STEPS, 1.0]


class Float64InFloat32(Odd):
    def shown(self) -> Any:
        return super().shown().astype(np.float64)


class SameArrayAgain(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.held = np.zeros(2, np.float32)

    def shown(self) -> Any:
        self.held[:] = super().shown()
        return self.held


class DictWithMore(Odd):
    observation_space = spaces.Dict({"a": Odd.observation_space, "b": spaces.Discrete(3, start=-1)})

    def shown(self) -> Any:
        return {"debug": object(), "b": np.int64(self.count % 3 - 1), "a": super().shown()}


class TupleOfBoth(Odd):
    observation_space = spaces.Tuple((Odd.observation_space, spaces.MultiBinary([4])))

    def shown(self) -> Any:
        return super().shown(), np.ones(4, np.int8)


class MaskAsList(Odd):
    def info(self) -> dict[str, Any]:
        return {"action_mask": [self.count % 2 == 0, True]}


class MaskOfWholeNumbers(Odd):
    def info(self) -> dict[str, Any]:
        return {"action_mask": np.array([self.count % 2, 1], np.int64)}


class MaskInObservation(Odd):
    observation_space = spaces.Dict({"seen": Odd.observation_space, "action_mask": spaces.MultiBinary(2)})

    def shown(self) -> Any:
        return {"seen": super().shown(), "action_mask": np.array([0, 1], np.int8)}

    def step(self, action: Any) -> Any:
        assert action == 1, f"action {action} is forbidden"
        return super().step(action)


class AdditiveMask(Odd):
    def info(self) -> dict[str, Any]:
        return {"action_mask": np.array([-np.inf, 0.0])}


STRICT: Final = (
    spaces.Discrete(2, dtype=np.int32),
    spaces.Discrete(3, start=-1, dtype=np.int8),
    spaces.MultiDiscrete([2, 3], dtype=np.uint8),
    spaces.MultiBinary(3),
    spaces.Box(-1.0, 1.0, (2,), np.float32),
    spaces.Dict({"b": spaces.Discrete(2, dtype=np.int16), "a": spaces.Box(0.0, 1.0, (1,), np.float16)}),
    spaces.Tuple((spaces.Discrete(2, dtype=np.uint8), spaces.MultiBinary(2))),
)


class StrictAboutActions(Odd):
    def __init__(self, which: int) -> None:
        super().__init__()
        self.action_space = STRICT[which]

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        return self.shown(), 1.0, False, False, {}


class RaisesForTheForbidden(Odd):
    def info(self) -> dict[str, Any]:
        return {"action_mask": np.array([False, True])}

    def step(self, action: Any) -> Any:
        if action != 1:
            raise ValueError(f"action {action} is forbidden now, only 1 is allowed")
        return super().step(action)


class RaisesNowAndThen(Odd):
    every: ClassVar[int] = 50
    steps: ClassVar[int] = 0

    def step(self, action: Any) -> Any:
        type(self).steps += 1
        if type(self).steps % self.every == 0:
            raise RuntimeError("the simulator has diverged")
        return super().step(action)


class NanNowAndThen(RaisesNowAndThen):
    def step(self, action: Any) -> Any:
        try:
            return super().step(action)
        except RuntimeError:
            return np.full(2, np.nan, np.float32), 1.0, False, False, {}


class InfiniteRewardNowAndThen(RaisesNowAndThen):
    def step(self, action: Any) -> Any:
        try:
            return super().step(action)
        except RuntimeError:
            return self.shown(), np.inf, False, False, {}


class ExitsNowAndThen(RaisesNowAndThen):
    def step(self, action: Any) -> Any:
        try:
            return super().step(action)
        except RuntimeError:
            raise SystemExit(3) from None


class BrokenUntilMadeAgain(Odd):
    """Raises once, and in every reset behind it: only another one goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.is_broken = 0, False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if self.is_broken:
            raise ConnectionError("the simulator is gone")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        self.steps += 1
        self.is_broken |= self.steps == 3 * STEPS
        if self.is_broken:
            raise ConnectionError("the simulator is gone")
        return super().step(action)


class ForksAndEndsItsChildren(Odd):
    """Has a child that it ends by SIGTERM in every reset."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        child = multiprocessing.get_context("fork").Process(target=signal.pause)
        child.start()
        child.terminate()
        child.join(10)
        assert child.exitcode == -signal.SIGTERM, f"the child was not ended: {child.exitcode}"
        return super().reset(seed=seed, options=options)


class Heavy(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.held = np.random.default_rng(0).integers(0, 255, 10 * 2**20, np.uint8)


class SlowToMake(Odd):
    def __init__(self) -> None:
        super().__init__()
        time.sleep(float(os.environ.get("ODD_SECONDS", "0.2")))  # as an engine that loads


class NeverEnds(Odd):
    def step(self, action: Any) -> Any:
        observation, reward, *_ = super().step(action)
        self.count %= STEPS
        return observation, reward, False, False, {}


class Torch64(Odd):
    def __init__(self) -> None:
        import torch

        super().__init__()
        torch.set_default_dtype(torch.float64)


class FarFromOne(Odd):
    """A force from 65 to 1140: the nearer to 1000, the more it pays."""

    action_space = spaces.Box(65.0, 1140.0, (1,), np.float32)

    def paid(self, action: Any) -> Any:
        assert self.action_space.contains(np.asarray(action)), f"{action} is outside"
        return float(1.0 - abs(float(action[0]) - 1000.0) / 1000.0)


class LargeOffset(Odd):
    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)

    def shown(self) -> Any:
        return np.array([1e8 + self.count % 4])


class Grid(Odd):
    observation_space = spaces.Box(0, 10, (7, 7, 3), np.uint8)

    def shown(self) -> Any:
        return np.full((7, 7, 3), self.count % 11, np.uint8)


class Pixels(Odd):
    observation_space = spaces.Box(0, 255, (96, 96, 3), np.uint8)

    def shown(self) -> Any:
        return np.full((96, 96, 3), self.count, np.uint8)


class OldStep(Odd):
    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated or truncated, info


class OldReset(Odd):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed=seed, options=options)[0]


class NoReward(Odd):
    def paid(self, action: Any) -> Any:
        return None


class RewardsOfTwo(Odd):
    def paid(self, action: Any) -> Any:
        return np.ones(2)


class OtherShape(Odd):
    def shown(self) -> Any:
        return np.zeros(3, np.float32)


class OtherShapeLater(Odd):
    """It shows another form in its third step."""

    def shown(self) -> Any:
        return np.zeros(3 if self.count == 3 else 2, np.float32)


class LacksAKey(DictWithMore):
    def shown(self) -> Any:
        return {"a": np.zeros(2, np.float32)}


class LeavesItsProcess(Odd):
    def step(self, action: Any) -> Any:
        os._exit(7)


class AlwaysRaises(Odd):
    def step(self, action: Any) -> Any:
        raise RuntimeError("no licence")


TRAINS: Final = (
    RewardOfOneElement, RewardOfFloat16, WholeReward, TruthInNumpy, InfosOfEveryKind, ListsAsObservations,
    Float64InFloat32, SameArrayAgain, DictWithMore, TupleOfBoth, MaskAsList, MaskOfWholeNumbers,
    MaskInObservation, RaisesForTheForbidden, RaisesNowAndThen, NanNowAndThen, InfiniteRewardNowAndThen,
    ExitsNowAndThen, BrokenUntilMadeAgain, ForksAndEndsItsChildren, Heavy, SlowToMake, NeverEnds, Torch64,
    FarFromOne, LargeOffset, Grid, Pixels,
)  # fmt: skip
REFUSED: Final = {
    OldStep: "step returned tuple .*return \\(observation, reward, terminated, truncated, info\\)",
    OldReset: "reset returned ndarray .*return \\(observation, info\\)",
    NoReward: "step returned NoneType None: reward must be one number",
    RewardsOfTwo: "step returned ndarray .*reward must be one number",
    OtherShape: "reset returned ndarray .*shape \\(3,\\) and not \\(2,\\)",
    OtherShapeLater: "step returned ndarray .*shape \\(3,\\) and not \\(2,\\)",
    LacksAKey: "reset returned dict .*lacks \\['b'\\]",
    AdditiveMask: "reset returned ndarray .*no mask of the action space \\(a mask holds -inf; use 1",
    AlwaysRaises: "step: RuntimeError: no licence \\(5 failures in a row\\)",
}
MASKED: Final = (AdditiveMask, MaskAsList, MaskOfWholeNumbers, MaskInObservation, RaisesForTheForbidden)

for _kind in (*TRAINS, *REFUSED, StrictAboutActions, LeavesItsProcess):
    gymnasium.register(f"{_kind.__name__}-v0", f"{__name__}:{_kind.__name__}")
