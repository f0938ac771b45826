"""A folder of a run with two registered versions, whose loop is driven without processes."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config.sections import CanarySection
from penstock.config.settings import Settings, dump, load
from penstock.policy.weights import sha256
from penstock.registry.canary import ClientReturn, Trial
from penstock.registry.ratings import Rating
from penstock.registry.records import NewVersion, Origin, PolicyVersion, Status
from penstock.registry.registry import Registry
from penstock.registry.weight_files import write_kept
from penstock.workloads.chat import loop_state
from penstock.workloads.chat.learning_loop import WAITS_S, LearningLoop, run_name
from penstock.workloads.chat.loop_state import LoopOrder, LoopState, Step
from penstock.workloads.chat.step_process import ServedRun, read_run

POLICY = "default"


def settings_of(model: str, **sections: Any) -> Settings:
    """Of a run of a language model."""
    usual: dict[str, Any] = {
        "workload": "rlhf",
        "run": "talk",
        "environment": {
            "id": "chat",
            "count": 1,
            "kwargs": {"model": model, "task": "chat", "response_tokens": 8},
        },
        "policy": {"kwargs": {"model": model, "rank": 4}},
        "algorithm": {"name": "token_ppo", "batch_steps": 64},
        "actor": {"unroll_length": 63},
    }
    return load([usual, sections])


@dataclass(slots=True)
class LoopStand:
    """The run. active, made: versions, of which `made` is that of round 1."""

    run: ServedRun
    registry: Registry
    active: PolicyVersion
    made: PolicyVersion

    @property
    def folder(self) -> Path:
        """Of the loop."""
        return loop_state.folder_of(self.run.folder)

    def at(self, **changes: Any) -> None:
        """The loop stands there."""
        loop_state.write_state(self.folder, LoopState(**{"number": 1, "labels": 7, "through": 3, **changes}))

    def on_trial(self, share: float = 0.5) -> None:
        """The version of round 1 is the canary."""
        self.at(step=Step.TRIAL, version=self.made.version)
        self.registry.promote(
            POLICY, self.made.version, "tried", by="test", to=Status.CANARY, canary_share=share
        )

    def see(self, canary: float, active: float, people: int) -> None:
        """So many people of each arm have earned that much."""
        trial = Trial.of(self.registry.arms(POLICY))
        assert trial is not None
        seen = [
            ClientReturn(
                client=f"{arm}-{number}", level=0, canary=arm, part=0.5, value=canary if arm else active
            )
            for number in range(people)
            for arm in (True, False)
        ]
        self.registry.judge(POLICY, trial, CanarySection(), seen)

    def rate(self, count: int, *, rater: str = "", begin: int = 0) -> None:
        """So many thumbs, each of a person of its own unless one is named."""
        self.registry.add_ratings(
            POLICY,
            [
                Rating(
                    prompt=[{"role": "user", "content": f"question {number}"}],
                    response="answer",
                    score=1.0,
                    key="thumb",
                    rater=rater or f"person-{number}",
                )
                for number in range(begin, begin + count)
            ],
        )

    def loop(
        self,
        order: LoopOrder,
        draining: threading.Event,
        *,
        once: bool = True,
        waits_s: Sequence[float] = WAITS_S,
    ) -> LearningLoop:
        """A loop of this run."""
        return LearningLoop(self.run, order, draining, once=once, waits_s=waits_s)

    @contextmanager
    def going(self, order: LoopOrder, waits_s: Sequence[float] = WAITS_S) -> Iterator[None]:
        """The loop goes on in a thread while the block runs."""
        over = threading.Event()
        loop = self.loop(order, over, once=False, waits_s=waits_s)
        thread = threading.Thread(target=loop.go, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def state(self) -> LoopState:
        """Where the loop stands."""
        return loop_state.read_state(self.folder)


@contextmanager
def loop_stand(folder: Path, model: str = "base", **sections: Any) -> Iterator[LoopStand]:
    """A run below a folder; version 1 is active, and one that round 1 registered is a candidate."""
    run_dir = folder / "run"
    run_dir.mkdir()
    (run_dir / "config.toml").write_text(dump(settings_of(model, **sections)))
    run = read_run(run_dir)
    with Registry.open(run.url, migrate=True) as registry:
        active = _registered(registry, run_dir, 1, run.settings.run)
        registry.promote(POLICY, 1, "first", by="test")
        place = loop_state.round_folder(loop_state.folder_of(run_dir), 1) / "run"
        made = _registered(registry, place, 100, run_name(run, 1))
        yield LoopStand(run, registry, active, made)


def _registered(registry: Registry, place: Path, version: int, run: str) -> PolicyVersion:
    blob = f"weights of {version}".encode()
    write_kept(place, version, blob)
    new = NewVersion(
        policy=POLICY,
        version=version,
        run=run,
        update=version,
        sha256=sha256(blob),
        size_bytes=len(blob),
        origin=Origin.FINAL,
        place=str(place),
    )
    return registry.register(new, by="test")


def soon(found: Callable[[], bool], within_s: float = 20.0) -> bool:
    """Whether it becomes true in time."""
    pause, tries = threading.Event(), int(within_s / 0.05)
    return any(found() or pause.wait(0.05) for _ in range(tries))
