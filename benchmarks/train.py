"""Whole runs of `penstock train CartPole-v1`: rate, seconds until solved, start, memory, cost of the log.

`python -m benchmarks.train learn STEPS SEED` is the learner of the run without a log; it starts
`python -m benchmarks.train act DESCRIPTOR STEPS SEED`, its actor, which loads no torch.
"""

import json
import resource
import select
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from benchmarks.stand import PENSTOCK, PREFIX, Cell, Options, Table, known_median, shell
from penstock.actor import specification as actor_run
from penstock.actor.rollout.generator import FragmentBuilder, HeaderFields, action_seed, environment_seeds
from penstock.config.algorithm_sections import PPOSection
from penstock.config.settings import Settings, load
from penstock.protocol.fragment import Fragment, header_bytes, parse_header
from penstock.protocol.messages import Episode, Publication
from penstock.protocol.specification import RunSpecification
from penstock.runtime.lifecycle import keep_freed_memory
from penstock.workloads.control.defaults import for_environment

TASK: Final = "CartPole-v1"
ROLES: Final = ("actor", "broker", "redis", "learner", "evaluator")
SHORT, LONG = 100_000, 400_000
FIRST_UPDATE: Final = "learning ended"
"""What a learner logs behind its first update when the run is asked for one step."""
IMPORTS: Final = (sys.executable, "-c", "import torch, gymnasium")


class Trained(NamedTuple):
    """A run that has ended. metrics: the lines of `metrics.jsonl`. log: the learner's."""

    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    log: str

    @property
    def seconds(self) -> float:
        """Return the seconds of training."""
        return float(self.summary["env_steps"] / self.summary["env_steps_per_second"])

    @property
    def cpu_seconds(self) -> Mapping[str, float]:
        """Return the CPU seconds of the processes of each role, from their start to their end."""
        spent = Counter(dict.fromkeys(ROLES, 0.0))
        for process in self.summary["processes"]:
            spent[process["role"]] += process["cpu_seconds"]
        return spent


def trained(*options: str, task: str = TASK, steps: int | None = None) -> Trained:
    """Run once; with `steps` it goes on to its end, else it stops at the target."""
    budget = () if steps is None else ("--total-steps", str(steps), "--set", "learner.stop_at_target=false")
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
        run = Path(folder) / "run"
        command = (PENSTOCK, "train", task, *options, *budget, "--run-dir", str(run), "--json")
        summary = json.loads(shell(["sh", "-c", f"exec {shlex.join(command)}"]))
        metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return Trained(summary, metrics, (run / "logs" / "learner.log").read_text())


def table(options: Options) -> Table:
    """Return end-to-end steps per second, and seconds until solved."""
    rows = []
    for vectorise in ("sync", "vector"):
        choice = ("--set", f"environment.vectorise={vectorise}")
        full = [trained(*choice, steps=LONG) for _ in range(options.repeat)]
        spent = [{role: run.cpu_seconds[role] / run.summary["env_steps"] for role in ROLES} for run in full]
        solved = [trained(*choice).summary for _ in range(options.repeat)]
        seconds = [one["solved_at"]["seconds"] if one["solved"] else None for one in solved]
        rows.append((
            vectorise,
            median(run.summary["env_steps_per_second"] for run in full),
            known_median(seconds),
            f"{len(seconds) - seconds.count(None)} of {options.repeat}",
            *(1e6 * median(one[role] for one in spent) for role in ROLES),
        ))  # fmt: skip
    return Table(
        title=f"penstock train {TASK}, {LONG:,} steps",
        columns=(
            *("vectoriser", "environment steps/s", "training seconds until solved", "solved"),
            *(f"{role}: CPU s per 10⁶ steps" for role in ROLES),
        ),
        rows=rows,
        note="CPU seconds: the processes of a role together, from start (imports included) to end",
    )


# ---- start and memory


def startup_table(options: Options) -> Table:
    """Return median seconds to the first update, beside two concurrent imports of torch and Gymnasium.

    All are measured in turn, after one round that only warms the disk's cache.
    """
    measures: dict[str, Callable[[], float]] = {
        "penstock train → first update": _first_update_s,
        "two imports of torch and gymnasium": _imports_s,
        "penstock --help": _help_s,
    }
    rounds = [[measure() for measure in measures.values()] for _ in range(1 + max(options.repeat, 5))][1:]
    rows: list[tuple[Cell, ...]] = [
        (name, median(one[at] for one in rounds), median(one[at] / one[1] for one in rounds))
        for at, name in enumerate(measures)
    ]
    return Table(
        title=f"start-up of penstock train {TASK}",
        columns=("what", "seconds", "of the imports"),
        rows=rows,
        note="aims: the first update within 1.5 of the imports, help within 0.3 s",
    )


def _first_update_s() -> float:
    began_s = time.time()
    return logged_at_s(trained("--total-steps", "1").log, FIRST_UPDATE) - began_s


def logged_at_s(log: str, message: str) -> float:
    """Return when a process first logged `message`, since the epoch; raises ValueError if never."""
    for line in log.splitlines():
        if message in line:
            return datetime.fromisoformat(line.partition(" ")[0]).timestamp()
    raise ValueError(f"the log has no {message!r}: {log[-500:]!r}")


def _imports_s() -> float:
    began_s = time.perf_counter()
    codes = [process.wait() for process in [subprocess.Popen(IMPORTS) for _ in range(2)]]
    if any(codes):
        raise RuntimeError(f"{' '.join(IMPORTS)}: exit {codes}")
    return time.perf_counter() - began_s


def _help_s() -> float:
    began_s = time.perf_counter()
    subprocess.run([PENSTOCK, "--help"], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began_s


def memory_table(options: Options) -> Table:
    """Return the peak memory of each process of a run."""
    runs = [trained(steps=60_000).summary["processes"] for _ in range(options.repeat)]
    peaks = zip(*([one["peak_memory_bytes"] / 1e6 for one in run] for run in runs), strict=True)
    return Table(
        title=f"resident memory at its peak, `penstock train {TASK}`, 60,000 steps",
        columns=("process", "MB"),
        rows=[(one["role"], median(each)) for one, each in zip(runs[0], peaks, strict=True)],
        note="aims: a rollout worker below 350 MB, a broker below 150",
    )


# ---- what exactly-once costs


def exactly_once_table(options: Options) -> Table:
    """Return CPU seconds for a million steps, beside the same learner and actor joined by a pipe.

    The pipe replaces broker, Redis, acknowledgements, leases, checkpoints, reports and evaluations. Batches,
    updates, fragments and the staleness budget are those of a run. The difference of a long and a short
    training leaves start and end out.
    """
    ways = {"broker and Redis": _logged, "a pipe": _piped}
    rounds = [
        {name: _difference(way(SHORT, seed), way(LONG, seed)) for name, way in ways.items()}
        for seed in range(1, options.repeat + 1)
    ]
    totals = {name: median(sum(one[name][role] for role in ROLES) for one in rounds) for name in ways}
    return Table(
        title=f"what exactly-once costs: CPU seconds for a million steps of {TASK}",
        columns=("actor and learner joined by", "all", "÷ a pipe", *ROLES, "steps/s"),
        rows=[
            (
                *(name, totals[name], totals[name] / totals["a pipe"]),
                *(median(one[name][role] for one in rounds) for role in ROLES),
                1e6 / median(one[name]["seconds"] for one in rounds),
            )
            for name in ways
        ],
        note=f"from {SHORT:,} to {LONG:,} steps; what a pipe holds is lost with either process",
    )


def _logged(steps: int, seed: int) -> Mapping[str, float]:
    run = trained("--seed", str(seed), steps=steps)
    return {**run.cpu_seconds, "seconds": run.seconds, "steps": run.summary["env_steps"]}


def _piped(steps: int, seed: int) -> Mapping[str, float]:
    command = [sys.executable, "-m", "benchmarks.train", "learn", str(steps), str(seed)]
    spent: dict[str, float] = json.loads(shell(command))
    return dict.fromkeys(ROLES, 0.0) | spent


def _difference(short: Mapping[str, float], long: Mapping[str, float]) -> dict[str, float]:
    millions = (long["steps"] - short["steps"]) / 1e6
    return {name: (long[name] - short[name]) / millions for name in (*ROLES, "seconds")}


class Ended(Exception):
    """The other end is closed."""


class Messages:
    """Bytes over one end of a socket pair, each message behind its length."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, data: bytes | memoryview) -> None:
        try:
            self._end.sendall(len(data).to_bytes(8))
            self._end.sendall(data)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Ended from error

    def receive(self) -> bytes:
        return self._receive(int.from_bytes(self._receive(8)))

    def has_come(self) -> bool:
        return bool(select.select([self._end], [], [], 0)[0])

    def _receive(self, size: int) -> bytes:
        try:
            data = self._end.recv(size, socket.MSG_WAITALL)
        except ConnectionResetError as error:
            raise Ended from error
        if len(data) < size:
            raise Ended
        return data


class Experience:
    """An actor without its network: weights in, fragments and ended episodes out."""

    def __init__(self, run: actor_run.Run, seed: int, actor_id: str = "actor-0") -> None:
        count = run.environment.count
        self.episodes: list[Episode] = []
        self._specification = run.specification
        self._stepper = run.make_environment(run.environment, count, seed)
        self._policy = run.make_policy(seed).policy
        self._policy.seed_actions(action_seed(seed, actor_id, 0))
        self._builder = FragmentBuilder(run.specification.schema, run.specification.unroll_length, count)
        first = self._stepper.reset(environment_seeds(seed, actor_id, 0, count))
        self._builder.start(first | self._policy.initial_state(count))
        self._sequence = 0

    def fragment(self, weights: bytes, update: int) -> Fragment:
        """Return the next unroll, acted with `weights`, those of update number `update`."""
        self._policy.load(weights)
        while not self._builder.is_full:
            acted = self._policy.act(self._builder.observation())
            stepped = self._stepper.step(self._policy.environment_action(acted.action))
            self._builder.record(acted.action, acted.log_prob, stepped, acted.state)
        self._sequence += 1
        publication = Publication(version=update + 1, update=update)
        run = self._specification.run
        fields = HeaderFields(run=run, session=1, sequence=self._sequence, weights=publication, round=0)
        fragment, episodes = self._builder.cut(fields)
        self.episodes += episodes
        return fragment


def piped_settings(steps: int, seed: int) -> Settings:
    """Return the settings of `penstock train CartPole-v1`."""
    learner = {"device": "cpu", "total_steps": steps}
    over = {"run": "piped", "seed": seed, "environment": {"id": TASK}, "learner": learner}
    return load([for_environment(TASK, "ppo"), over])


def _learn(steps: int, seed: int) -> dict[str, float]:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "benchmarks.train", "act", str(theirs.fileno()), str(steps), str(seed)]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        began_s = time.perf_counter()
        made = _learn_from(Messages(ours), piped_settings(steps, seed), steps)
        seconds = time.perf_counter() - began_s
        ours.close()
    if process.returncode != 0:
        raise RuntimeError(f"the actor ended with {process.returncode}")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = {"learner": time.process_time(), "actor": used.ru_utime + used.ru_stime}
    return {"steps": made, "seconds": seconds, **spent}


def _learn_from(actor: Messages, settings: Settings, total_steps: int) -> int:
    """Learn from so many steps that `actor` sends; return how many there were."""
    from penstock.learner.batch import assemble
    from penstock.learner.model import make_model, use_threads
    from penstock.policy.weights import encode

    use_threads(settings)
    model = make_model(settings)
    algorithm, steps = model.algorithm, 0
    actor.send(model.specification.encode())
    while steps < total_steps:
        actor.send(encode(algorithm.published_modules()["default"]))
        fragments: list[Fragment] = []
        while not algorithm.makes_batch(len(fragments), sum(one.header.charge for one in fragments)):
            fragments.append(Fragment(parse_header(actor.receive()), actor.receive()))
        batch = assemble([(one.header, one.arrays()) for one in fragments], model.device)
        update = algorithm.update(batch, progress=steps / total_steps)
        if not update.applied:
            raise RuntimeError(f"update {algorithm.updates}: {update.reason}")
        steps += update.steps
    return steps


def _act(descriptor: int, steps: int, seed: int) -> None:
    """Act with the newest weights, within the staleness budget, until the learner closes its end."""
    settings, learner = piped_settings(steps, seed), Messages(socket.socket(fileno=descriptor))
    specification = RunSpecification.decode(learner.receive())
    experience = Experience(actor_run.read(specification, settings.actor), settings.seed)
    assert isinstance(settings.algorithm, PPOSection)
    batch_steps, staleness = settings.algorithm.batch_steps, settings.algorithm.staleness
    weights, update, sent = b"", -1, 0
    while True:
        while update < 0 or sent >= (update + 1 + staleness) * batch_steps or learner.has_come():
            weights, update = learner.receive(), update + 1
        fragment = experience.fragment(weights, update)
        learner.send(header_bytes(fragment.header))
        learner.send(fragment.payload)
        sent += fragment.header.charge


def main() -> None:
    keep_freed_memory()
    what, *numbers = sys.argv[1:]
    if what == "learn":
        print(json.dumps(_learn(*map(int, numbers))))
        return
    try:
        _act(*map(int, numbers))
    except Ended:
        return


if __name__ == "__main__":
    main()
