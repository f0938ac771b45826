"""The newest reward model of a loop, kept and served beside it: `judge/`, `judge.json`, `judge.log`.

The process is begun again where it has ended, or where there is a newer model, and ends with the loop.
"""

import fcntl
import json
import logging
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from penstock.config.configuration_error import ConfigurationError
from penstock.config.run_folder import make_private
from penstock.registry.weight_files import replace_file
from penstock.runtime.health import read_endpoint
from penstock.workloads.chat.loop import loop_state
from penstock.workloads.chat.loop.step_process import CARD, JUDGE, KNOWN, start_command
from penstock.workloads.language.reward.heads import (
    PREFERRED,
    Head,
    parse_heads,
    parse_weights,
    reward_weights,
)

log = logging.getLogger(__name__)

_ENDPOINT: Final = "judge.json"
_LOG: Final = "judge.log"
_END_S: Final = 30.0


def keep_judge(folder: Path, made: Path) -> None:
    """Keep a round's reward model as the loop's newest, without what people wrote."""
    new, old = folder / f".{JUDGE}-new", folder / f".{JUDGE}-old"
    for path in (new, old):
        shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(made, new)
    card: Mapping[str, Any] = json.loads((made / CARD).read_bytes())
    trained = {"settings": card["trained"]["settings"]}
    replace_file(new / CARD, json.dumps({**card, "checks": [], "trained": trained}).encode())
    if (folder / JUDGE).exists():
        (folder / JUDGE).rename(old)
    new.rename(folder / JUDGE)
    shutil.rmtree(old, ignore_errors=True)


def judge_address(folder: Path) -> str:
    """Return where the model of a loop answers; "" where it does not."""
    found = read_endpoint(folder / _ENDPOINT)
    return "" if found is None or not found.address else str(found.address)


class ServedJudge:
    """Its process while the block runs. folder: of the loop."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._child: subprocess.Popen[bytes] | None = None
        self._serves = 0.0
        self._pipe: tuple[int, int] | None = None

    def __enter__(self) -> Self:
        self._end()  # what a killed loop has left says nothing any more
        self._pipe = os.pipe()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        for end in self._pipe or ():
            os.close(end)

    def look(self) -> None:
        """Have the newest model served, where there is one; raises OSError."""
        try:
            newest = (self._folder / JUDGE / CARD).stat().st_mtime
        except FileNotFoundError:
            return
        if self._child is not None and (self._serves != newest or self._child.poll() is not None):
            self._end()
        if self._child is None:
            self._serves = newest
            self._begin()

    def _begin(self) -> None:
        assert self._pipe is not None
        words = ("rlhf", "reward", "serve", JUDGE, "--listen", "127.0.0.1:0", "--endpoints", _ENDPOINT)
        with (self._folder / _LOG).open("wb") as out:
            self._child = start_command(words, self._folder, out, self._pipe[0])

    def _end(self) -> None:
        child, self._child = self._child, None
        (self._folder / _ENDPOINT).unlink(missing_ok=True)
        if child is None:
            return
        child.terminate()
        try:
            child.wait(_END_S)
        except subprocess.TimeoutExpired:
            log.warning("the judge did not end in time, and is killed", extra={"seconds": _END_S})
            child.kill()
            child.wait()


# ---- What each criterion counts in the reward of a loop, as people change it while the loop goes on.

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
    """Return what people have changed of a loop's weights; ConfigurationError: it cannot be read."""
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
    """Change weights of heads from the next reward model on; returns those of all heads by now."""
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
    """Return what every head counts by now; all 0 where those that count are of an earlier start."""
    heads, known = _known(order, weighed.standing)
    return {**{one.name: 1.0 for one in heads}, PREFERRED: 0.0, **known}


def shown_weights(weights: Mapping[str, float]) -> str:
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
