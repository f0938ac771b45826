"""Ways to poison a fragment, each with what must become of it.

broker     refused before it is stored
check      booked `invalid` before it meets a tensor
replaced   a terminal observation of no space: trained, with another observation in its place
update     left out of the update that it makes fail
bounded    it cannot be told from honest experience: trained, and the update stays finite
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Arrays = dict[str, Any]
Outcome = Literal["broker", "check", "replaced", "update", "bounded"]


@dataclass(frozen=True)
class Way:
    """One way. spoil: changes copies of a fragment's tensors. outcome: what must become of it."""

    name: str
    spoil: Callable[[Arrays], None]
    outcome: Outcome


def put(name: str, value: Any) -> Callable[[Arrays], None]:
    def spoil(arrays: Arrays) -> None:
        arrays[name][1, 0] = value

    return spoil


def fill(name: str, value: Any) -> Callable[[Arrays], None]:
    def spoil(arrays: Arrays) -> None:
        arrays[name][...] = value

    return spoil


def unseen(name: str, value: Any) -> Callable[[Arrays], None]:
    def spoil(arrays: Arrays) -> None:
        arrays["valid"][1, 0] = arrays["terminated"][1, 0] = arrays["truncated"][1, 0] = False
        keep = (arrays["final/slot"] != 0) | (arrays["final/step"] != 1)
        for rows in (path for path in arrays if path.startswith("final/")):
            arrays[rows] = arrays[rows][keep]
        arrays[name][1, 0] = value

    return spoil


def end(arrays: Arrays, how: str, observation: Any) -> None:
    """Let only the last step of the first slot end an episode, with this observation."""
    arrays["terminated"][...] = arrays["truncated"][...] = False
    arrays[how][-1, 0] = True
    arrays["final/slot"] = np.zeros(1, np.int32)
    arrays["final/step"] = np.full(1, len(arrays["valid"]) - 1, np.int32)
    row = arrays["observation"][-1:, 0].copy()
    row[...] = observation
    arrays["final/observation"] = row


def ends(how: str, observation: Any) -> Callable[[Arrays], None]:
    return lambda arrays: end(arrays, how, observation)


def _twice(arrays: Arrays) -> None:
    end(arrays, "truncated", 0)
    for name in ("final/slot", "final/step", "final/observation"):
        arrays[name] = np.concatenate([arrays[name]] * 2)


def _pointing(name: str, value: int) -> Callable[[Arrays], None]:
    def spoil(arrays: Arrays) -> None:
        end(arrays, "truncated", 0)
        arrays[name][0] = value

    return spoil


def _unended(arrays: Arrays) -> None:
    end(arrays, "truncated", 0)
    arrays["truncated"][...] = False


def _without_final(arrays: Arrays) -> None:
    end(arrays, "truncated", 0)
    for name in ("final/slot", "final/step", "final/observation"):
        arrays[name] = arrays[name][:0]


def _reversed(arrays: Arrays) -> None:
    arrays["reward"][...] = -arrays["reward"]


def _forbidden(arrays: Arrays) -> None:
    arrays["mask/action"][1, 0] = True
    arrays["mask/action"][1, 0, arrays["action"][1, 0]] = False


def _shuffled(arrays: Arrays) -> None:
    arrays["observation"][...] = arrays["observation"][::-1].copy()


OF_EVERY_RUN = (
    Way("reward is NaN", put("reward", np.nan), "broker"),
    Way("reward is infinite", put("reward", np.inf), "broker"),
    Way("reward of a simulation that blew up", put("reward", 1e20), "broker"),
    Way("largest negative reward", put("reward", -3e38), "broker"),
    Way("log-probability is NaN", put("log_prob", np.nan), "broker"),
    Way("log-probability is minus infinity", put("log_prob", -np.inf), "broker"),
    Way("log-probability of -1e30", put("log_prob", -1e30), "broker"),
    Way("log-probability of 1e5", put("log_prob", 1e5), "broker"),
    Way("final row of a slot that is not there", _pointing("final/slot", 7), "check"),
    Way("final row of a negative step", _pointing("final/step", -1), "check"),
    Way("final row of a step that did not end", _pointing("final/step", 0), "check"),
    Way("final row of an episode that goes on", _unended, "check"),
    Way("final row twice", _twice, "check"),
    Way("no final row of a truncated step", _without_final, "check"),
    Way("largest plausible reward", put("reward", 1e6), "bounded"),
    Way("rewards with the wrong sign", _reversed, "bounded"),
    Way("observations of other steps", _shuffled, "bounded"),
    Way("all rewards are 0", fill("reward", 0.0), "bounded"),
)
OF_BOXES = (
    Way("observation is NaN", put("observation", np.nan), "check"),
    Way("observation is infinite", put("observation", -np.inf), "check"),
    Way("observation of 1e30", put("observation", 1e30), "check"),
    Way("largest observation", fill("observation", 3e38), "check"),
    Way("observation is NaN where not valid", unseen("observation", np.nan), "check"),
    Way("truncated with NaN", ends("truncated", np.nan), "check"),
    Way("truncated with 1e20", ends("truncated", 1e20), "check"),
    Way("terminated with NaN", ends("terminated", np.nan), "replaced"),
    Way("terminated with infinity", ends("terminated", np.inf), "replaced"),
    Way("observations at the edge of what is plausible", fill("observation", 900.0), "bounded"),
)
OF_CHOICES = (
    Way("action behind the last", put("action", 2), "check"),
    Way("negative action", put("action", -1), "check"),
    Way("largest action", fill("action", 2**62), "check"),
    Way("action behind the last where not valid", unseen("action", 5), "check"),
    Way("log-probability of a choice above 0", put("log_prob", 1.0), "check"),
    Way("log-probability of a choice of 90", put("log_prob", 90.0), "check"),
    Way("always the first action", fill("action", 0), "bounded"),
)
OF_DRAWS = (
    Way("action is NaN", put("action", np.nan), "check"),
    Way("action is infinite", put("action", np.inf), "check"),
    Way("action of 1e30", put("action", 1e30), "check"),
    Way("action is NaN where not valid", unseen("action", np.nan), "check"),
    Way("unlikely action", put("action", 5.0), "bounded"),
    Way("density of 2.7", put("log_prob", 1.0), "bounded"),
)
OF_RATIOS = (
    Way("log-probability of -200", put("log_prob", -200.0), "update"),
    Way("all log-probabilities of -5000", fill("log_prob", -5e3), "update"),
    Way("log-probability of -20", put("log_prob", -20.0), "bounded"),
)
"""Of algorithms that weigh by π/μ."""
OF_DENSITIES = (Way("log-probability of 90", put("log_prob", 90.0), "update"),)
"""Of such ones, where the action is a real number."""
OF_MASKS = (
    Way("mask that allows nothing", put("mask/action", False), "check"),
    Way("mask that allows nothing behind the last step", lambda a: a["mask/action"][-1].fill(False), "check"),
    Way("mask that forbids the action taken", _forbidden, "check"),
    Way("masks that allow nothing at all", fill("mask/action", False), "check"),
)
OF_STATE = (
    Way("state is NaN", fill("state/actor/h", np.nan), "check"),
    Way("state is infinite", fill("state/actor/h", np.inf), "check"),
    Way("state of 1e20", fill("state/actor/h", 1e20), "check"),
    Way("state of another episode", lambda a: a["state/actor/h"].__imul__(-1), "bounded"),
    Way("episodes begin nowhere", fill("begins", False), "bounded"),
)
