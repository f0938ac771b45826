"""What each criterion counts in the reward of a loop, as people change it while the loop goes on.

    RUN/loop/weights.json    what stands by now, and the changes, oldest first: whose, when and why

A change is of the heads that it names. It counts above the `--weight` that the loop was started with, and
stands until the next one of the same head. A reward model learns under the weights that stand when its
training begins. Any process may change them; the loop reads the file, which is whole at any moment.
"""

import fcntl
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from penstock.config.configuration_error import ConfigurationError
from penstock.config.run_folder import make_private
from penstock.registry.weight_files import replace_file
from penstock.workloads.chat.loop import loop_state
from penstock.workloads.chat.loop.round_files import KNOWN
from penstock.workloads.language.heads.head import PREFERRED, Head, parse_heads, parse_weights, reward_weights

FILE: Final = "weights.json"
_LOCK: Final = "weights.lock"
MOST_CHANGES: Final = 100
"""Changes that are remembered; what they came to stands all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """That somebody has changed weights. by: who. at_s: when, in Unix seconds."""

    weights: Mapping[str, float]
    reason: str
    by: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """What people have changed. standing: the weight of each head that anybody changed."""

    standing: Mapping[str, float] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()


def read_weighed(folder: Path) -> Weighed:
    """Return what people have changed of a loop's weights; nothing where there is no file.

    Raises ConfigurationError for a file that cannot be read.
    """
    file = folder / FILE
    try:
        found = json.loads(file.read_bytes())
        standing = {str(name): float(one) for name, one in found["standing"].items()}
        return Weighed(standing=standing, changes=tuple(Change(**one) for one in found["changes"]))
    except FileNotFoundError:
        return Weighed()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigurationError(
            f"{file}: cannot be read ({error}); move it away, and the weights are those of --weight again"
        ) from error


def weigh(folder: Path, weights: Mapping[str, float], reason: str, by: str) -> dict[str, float]:
    """Change what heads count, from the next reward model on; returns what every head counts by now.

    folder: of the loop. Raises ConfigurationError that names the weight: of no head, below 0, without end, or
    where all would be 0; nothing is changed then.
    """
    order = loop_state.read_state(folder).order
    with _held(folder):
        before = read_weighed(folder)
        heads, known = _known(order, before.standing)
        every = reward_weights(heads, {**known, **weights})
        change = Change(weights=dict(weights), reason=reason, by=by, at_s=time.time())
        after = Weighed(
            standing={**before.standing, **weights}, changes=(*before.changes, change)[-MOST_CHANGES:]
        )
        replace_file(folder / FILE, json.dumps(asdict(after), allow_nan=False, indent=1).encode())
    return every


def standing_weights(order: Mapping[str, Any], weighed: Weighed) -> dict[str, float]:
    """Return what every head counts by now. order: how the loop was started, as its state has it.

    All are 0 where those that count are heads of an earlier start: the next reward model says so.
    """
    heads, known = _known(order, weighed.standing)
    return {**{one.name: 1.0 for one in heads}, PREFERRED: 0.0, **known}


def shown_weights(weights: Mapping[str, float]) -> str:
    """Return weights as a line of text."""
    return ", ".join(f"{name} {one:g}" for name, one in weights.items())


def _known(
    order: Mapping[str, Any], standing: Mapping[str, float]
) -> tuple[tuple[Head, ...], dict[str, float]]:
    """Return the heads of a loop, and what was said of them: by its order, and above that by people."""
    heads = parse_heads(order.get("heads") or [f"{name}={scale}" for name, scale in KNOWN.items()])
    there = {*(one.name for one in heads), PREFERRED}
    said = {**parse_weights(order.get("weights", ())), **standing}
    # The loop may have had other heads when an earlier change was made.
    return heads, {name: one for name, one in said.items() if name in there}


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """One change at a time, whichever process makes it."""
    make_private(folder)
    with (folder / _LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
