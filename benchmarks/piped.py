"""What exactly-once costs: runs of CartPole-v1 beside the same learner and actor with a pipe between them.

The pipe is all that is left of broker, Redis, acknowledgements, leases, checkpoints, reports and evaluations:
what it holds is lost with either process. Batches, updates, fragments and the staleness budget are those of a
run. Both are measured in turn, each by the difference of a long and a short training, which leaves start and
end out.

`python -m benchmarks.piped STEPS SEED` is the pipe's learner; it starts `benchmarks.piped_actor`.
"""

import json
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Final

from benchmarks.piped_actor import Messages, settings_of
from benchmarks.table import Options, Table
from benchmarks.training import ROLES, measure
from learner.batch import assemble
from learner.model.device import use_threads
from learner.model.model import make_model
from penstock.config.settings import Settings
from penstock.policy.weights import encode
from penstock.runtime.allocator import keep_freed_memory
from penstock.wire.fragment import Fragment, parse_header

SHORT: Final = 100_000
LONG: Final = 400_000

Spent = Mapping[str, float]
"""CPU seconds by role, and `seconds` of the clock, while `steps` were learned from."""


def table(options: Options) -> Table:
    """Return CPU seconds for a million steps by process, and steps per second."""
    rounds: dict[str, list[Spent]] = {"broker and Redis": [], "a pipe": []}
    for seed in range(1, options.repeat + 1):
        rounds["broker and Redis"].append(_difference(_run(SHORT, seed), _run(LONG, seed)))
        rounds["a pipe"].append(_difference(_piped(SHORT, seed), _piped(LONG, seed)))
    totals = {
        name: statistics.median(sum(one[role] for role in ROLES) for one in of) for name, of in rounds.items()
    }
    return Table(
        title="what exactly-once costs: CPU seconds for a million steps of CartPole-v1",
        columns=("actor and learner joined by", "all", "÷ a pipe", *ROLES, "steps/s"),
        rows=[
            (
                name,
                totals[name],
                totals[name] / totals["a pipe"],
                *(statistics.median(one[role] for one in of) for role in ROLES),
                1e6 / statistics.median(one["seconds"] for one in of),
            )
            for name, of in rounds.items()
        ],
        note=f"from {SHORT:,} to {LONG:,} steps; what a pipe holds is lost with either process",
    )


def _run(steps: int, seed: int) -> Spent:
    done = measure(("--seed", str(seed)), total_steps=steps)
    return {**done.cpu_seconds, "seconds": done.env_steps / done.steps_per_second, "steps": done.env_steps}


def _piped(steps: int, seed: int) -> Spent:
    command = [sys.executable, "-m", "benchmarks.piped", str(steps), str(seed)]
    told: dict[str, float] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return dict.fromkeys(ROLES, 0.0) | told


def _difference(short: Spent, long: Spent) -> Spent:
    """Return what each million of the further steps took."""
    millions = (long["steps"] - short["steps"]) / 1e6
    return {name: (long[name] - short[name]) / millions for name in (*ROLES, "seconds")}


def learn(settings: Settings, actor: Messages) -> int:
    """Learn from what `actor` sends for `learner.total_steps`; return the steps that were learned from.

    Raises RuntimeError when an update was not applied.
    """
    use_threads(settings)
    model, total_steps = make_model(settings), settings.learner.total_steps
    assert total_steps is not None, "say learner.total_steps"
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


def main() -> None:
    """Learn, and print what it took as JSON."""
    keep_freed_memory()
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "benchmarks.piped_actor", str(theirs.fileno()), *sys.argv[1:]]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        settings = settings_of(*map(int, sys.argv[1:]))
        began_s = time.perf_counter()
        steps = learn(settings, Messages(ours))
        seconds = time.perf_counter() - began_s
        ours.close()
    if process.returncode != 0:
        sys.exit(f"the actor ended with {process.returncode}")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = {"learner": time.process_time(), "actor": used.ru_utime + used.ru_stime}
    print(json.dumps({"steps": steps, "seconds": seconds, **spent}))


if __name__ == "__main__":
    main()
