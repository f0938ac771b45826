"""A step of a round as a process of an ordinary command, which ends with the loop.

The process holds the round's lock as long as it lives, also when a killed loop left it behind. So no two
processes ever write into the folder of a round.
"""

import fcntl
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Self

from penstock.config.configuration_error import ConfigurationError
from penstock.config.credentials import registry_with_password
from penstock.config.run_folder import CONFIG_FILE
from penstock.config.settings import Settings, load, parse_toml
from penstock.config.trusted import check_own
from penstock.registry.records import PolicyVersion, Status
from penstock.registry.registry import Registry
from penstock.registry.weight_files import read_kept, registry_url
from penstock.runtime.exit import EXIT_OK
from penstock.runtime.health import read_endpoint
from penstock.runtime.lifecycle import LIFELINE_VARIABLE
from penstock.runtime.output_file import replace_file

LOG: Final = "steps.log"
LOCK: Final = "lock"
_LOOK_S: Final = 0.5
_TAIL_BYTES: Final = 8192


class StepFailed(Exception):
    """Reports a step that failed; the message names the cause and a remedy."""


class StepInterrupted(Exception):
    """Reports that the loop was stopped or paused before the step ended; the step is repeated later."""


def run_step(words: Sequence[str], folder: Path, wait: Callable[[float], bool]) -> None:
    """Run `penstock WORDS…` in a round's folder to its end.

    wait: waits for so many seconds, and returns whether to stop. Raises StepFailed, StepInterrupted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    reading, writing = os.pipe()
    try:
        with (folder / LOCK).open("a") as lock, (folder / LOG).open("ab") as log:
            _take(lock, wait)
            log.write(f"$ penstock {' '.join(words)}\n".encode())
            log.flush()
            begin = log.tell()
            child = start_command(words, folder, log, reading, lock.fileno())
            while child.poll() is None:
                if wait(_LOOK_S):
                    child.terminate()
                    child.wait()
                    raise StepInterrupted
    finally:
        os.close(reading)
        os.close(writing)
    code = child.returncode
    if code != EXIT_OK:
        said = _last_line(folder / LOG, begin) or f"exit code {code}"
        why = f"was killed by signal {-code}; its last line: {said}" if code < 0 else said
        command = " ".join(words[: 3 if words[0] == "rlhf" else 2])
        raise StepFailed(f"`penstock {command}`: {why}")


def start_command(
    words: Sequence[str], folder: Path, out: IO[bytes], lifeline: int, *held: int
) -> "subprocess.Popen[bytes]":
    """Start `penstock WORDS…`, which ends with its lifeline. held: further descriptors that it inherits."""
    return subprocess.Popen(
        (sys.executable, "-P", "-m", "penstock.launch.cli", *words),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=out,
        pass_fds=(lifeline, *held),
        env={**os.environ, LIFELINE_VARIABLE: str(lifeline)},
        process_group=0,  # a Ctrl-C reaches the loop alone, which ends its children in order
    )


def _take(lock: IO[str], wait: Callable[[float], bool]) -> None:
    """Take the round's lock, which a child of a killed loop may still hold; raises StepInterrupted."""
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if wait(_LOOK_S):
                raise StepInterrupted from None


def _last_line(log: Path, begin: int) -> str:
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(begin, file.tell() - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    # What --json prints is no error; a summary holds the cause as its last field.
    said = [line.strip() for line in lines if line[:1] not in ("", " ", "{", "}", "[", "]")]
    failure = [line.split(": ", 1)[1] for line in lines if line.startswith('  "failure": ')]
    return failure[-1].strip('",') if failure else said[-1] if said else ""


# ---- Files in the folder of a round: written by one step, read by the next, removed when the round is over.

BELIEVED: Final = "believed.jsonl"
PROMPTS: Final = "prompts.jsonl"
JUDGE: Final = "judge"
CARD: Final = "heads.json"
BEGIN: Final = "begin.safetensors"
RECIPE: Final = "round.toml"
RUN: Final = "run"
_SUMMARY: Final = "summary.json"
KNOWN: Final = {"thumb": "thumbs", "relevance": "stars", "helpfulness": "stars", "safety": "stars"}
"""Aspects that the page rates, and their scales."""
_LASTS: Final = frozenset({RUN, LOCK, LOG})
_LASTS_OF_RUN: Final = frozenset({"policies", "config.toml", "seal", _SUMMARY, "logs"})


def rated_heads(believed: Path) -> list[str]:
    """Return NAME=SCALE of each aspect of the page that was rated; raises StepFailed without any."""
    with believed.open() as file:
        keys = {json.loads(line)["key"] for line in file}
    found = [f"{name}={scale}" for name, scale in KNOWN.items() if name in keys]
    if not found:
        known = ", ".join(KNOWN)
        raise StepFailed(f"no rating is of {known}: name what people rate with --head NAME=SCALE")
    return found


def told_apart(card: Path) -> tuple[float | None, float | None]:
    """Return the held-out thumbs' area under the curve, and that or the pairs' accuracy; None: unknown."""
    measures: dict[str, Any] = json.loads(card.read_bytes())["trained"]["measures"]
    thumb: float | None = measures["heads"].get("thumb", {}).get("auc")
    return thumb, measures["pair_accuracy"] if thumb is None else thumb


def facts_of(card: Path) -> dict[str, Any]:
    """Return a reward model's weights, and its measures on held-out rows; neither holds people's texts."""
    found = json.loads(card.read_bytes())
    return {"weights": found["weights"], "measures": found["trained"]["measures"]}


def summary_of(run: Path) -> dict[str, Any] | None:
    """Return the summary of a training that has ended; None while it is incomplete."""
    try:
        summary: dict[str, Any] = json.loads((run / _SUMMARY).read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return None if not summary or summary["interrupted"] or "failure" in summary else summary


def not_better(run: Path) -> str:
    """Return in words that a training's evaluation does not find its version better; "" for none of it."""
    base = ((summary_of(run) or {}).get("evaluation") or {}).get("base")
    if not base or base["verdict"] == "better":
        return ""
    found = "worse than" if base["verdict"] == "worse" else "not distinguishable from"
    low, high = (base[one] for one in ("low", "high"))
    interval = "" if low is None else f" ({low:+.3f} to {high:+.3f})"
    return f"its evaluation finds it {found} the version it began with: {base['difference']:+.3f}{interval}"


def has_checkpoint(run: Path) -> bool:
    return any((run / "checkpoints").glob("[!.]*/state.json"))


def forget_texts(folder: Path) -> None:
    """Remove people's texts, and files that only a training needs, from a round's folder; raises OSError."""
    for path in folder.glob("*"):
        if path.name not in _LASTS:
            _remove(path)
    for path in (folder / RUN).glob("*"):
        if path.name not in _LASTS_OF_RUN:
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# ---- The newest reward model of a loop, stored and served: `judge/`, `judge.json`, `judge.log`. The process
# is restarted when it ended, or when there is a newer model. It ends with the loop.

log = logging.getLogger(__name__)

_ENDPOINT: Final = "judge.json"
_END_S: Final = 30.0


def keep_judge(folder: Path, made: Path) -> None:
    """Store a round's reward model as the loop's newest, without people's texts."""
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
    """Return the address of a loop's reward model; "" where it is not served."""
    found = read_endpoint(folder / _ENDPOINT)
    return "" if found is None or not found.address else str(found.address)


class ServedJudge:
    """Serves the loop's reward model while the block runs. folder: of the loop."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._child: subprocess.Popen[bytes] | None = None
        self._serves = 0.0
        self._pipe: tuple[int, int] | None = None

    def __enter__(self) -> Self:
        self._end()  # removes the address that a killed loop left
        self._pipe = os.pipe()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        for end in self._pipe or ():
            os.close(end)

    def look(self) -> None:
        """Serve the newest model, where there is one; raises OSError."""
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
        with (self._folder / "judge.log").open("wb") as out:
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
            log.warning("the reward model did not end in time, and is killed", extra={"seconds": _END_S})
            child.kill()
            child.wait()


# ---- The run that the loop trains: its settings, its registry, its active version.


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """A run by its folder, absolute. url: of its registry, with the password that a connection needs."""

    folder: Path
    settings: Settings
    url: str

    @property
    def policy(self) -> str:
        return self.settings.serving.policy

    @property
    def model(self) -> str:
        return str(self.settings.environment.kwargs["model"])

    def weights(self, version: PolicyVersion) -> bytes:
        place = Path(version.place) if version.place else self.folder
        return read_kept(place, version.version, version.sha256)


def read_run(folder: Path) -> ServedRun:
    """Return the run in a folder; raises ConfigurationError for another user's, or another kind of run."""
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise ConfigurationError(f"{folder}: no folder of a run; name one, such as chat-state/run")
    settings = load([parse_toml(file)])
    check_own(folder, settings, (), "start the loop where, and as whom, the run was made")
    if not settings.environment.kwargs.get("model") or settings.algorithm.name != "token_ppo":
        raise ConfigurationError(
            f"{folder}: is a run of workload {settings.workload!r} by {settings.algorithm.name!r}: the loop "
            "trains language models by token_ppo (docs/rlhf.md)"
        )
    url = registry_url(folder, registry_with_password(settings.registry))
    return ServedRun(folder=folder.absolute(), settings=settings, url=url)


def serving_version(registry: Registry, policy: str, *, by: str) -> PolicyVersion | None:
    """Return the active version; where there is none, make the newest registered one active."""
    active = registry.active(policy)
    if active is not None:
        return active
    candidates = registry.list(policy, Status.CANDIDATE)
    if not candidates:
        return None
    reason = "first version of the loop: canaries are compared with an active version"
    return registry.promote(policy, candidates[-1].version, reason, by=by)
