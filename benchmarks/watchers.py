"""What held watches cost a broker while an off-policy learner settles many times a second.

    python -m benchmarks.watchers [--watchers 0 200] [--rate 46] [--seconds 20]

One simulated actor sends, and the learner's side settles behind each fragment, as an off-policy run does. The
watchers have credit and end no fragment: all that they ask of the broker is to be told what is new.
"""

import argparse
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

import redis

from benchmarks.child import child
from benchmarks.experience_path import PACING, RUN, SLOTS, STEPS, specification_of
from benchmarks.services import Services, services
from benchmarks.transfer import cpu_seconds
from broker.log import keys
from broker.log.learner_log import LearnerLog
from penstock.wire.limits import KIB

PATIENCE_S: Final = 120.0
NEVER: Final = "0.0001"


def actors(here: Services, name: str, count: int, rate: str) -> list[str]:
    """Return the command of so many simulated actors."""
    options = ("--actor-id", name, "--count", str(count), "--rate", rate)
    return ["-m", "benchmarks.simulated_actor", "--broker", here.broker, *options]


def settle_for(log: LearnerLog, seconds: float, position: int) -> tuple[int, int]:
    """Settle behind each arrival for so long; returns position and the number of settles."""
    until, settles = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        for entry in log.read(position, 64, 50):
            position, settles = entry.number, settles + 1
            log.settle(position)
    return position, settles


def measure(watchers: int, rate: float, seconds: float) -> tuple[float, float]:
    """Return cores of the broker and settles per second."""
    with ExitStack() as stack:
        here = stack.enter_context(services(durability="memory"))
        log = LearnerLog.connect(here.redis_url, wait_s=10.0)
        stack.callback(log.close)
        log.acquire(RUN, "bench", 600_000)
        budget = (4 * watchers + 64) * STEPS * SLOTS
        log.start(specification_of(4 * KIB).encode(), replace(PACING, budget=budget))
        log.publish(b"weights", update=0, settled=0, scalars={})
        sender = stack.enter_context(child(actors(here, "sender", 1, str(rate))))
        stack.callback(sender.terminate)
        if watchers:
            crowd = stack.enter_context(child(actors(here, "watcher", watchers, NEVER)))
            stack.callback(crowd.terminate)
        _await_sessions(here.redis_url, watchers + 1)
        position, _ = settle_for(log, seconds / 4, 0)
        broker = here.endpoint("broker").pid
        before = cpu_seconds(broker)
        _, settles = settle_for(log, seconds, position)
        return (cpu_seconds(broker) - before) / seconds, settles / seconds


def _await_sessions(url: str, count: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    with redis.Redis.from_url(url) as client:
        while int(client.zcard(keys.OPEN)) < count:
            if time.monotonic() > deadline:
                raise RuntimeError(f"not all of {count} actors have a session after {PATIENCE_S:g} s")
            time.sleep(0.1)


def main() -> None:
    """Print a line for each number of watchers."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watchers", description=__doc__)
    parser.add_argument("--watchers", type=int, nargs="+", default=[0, 200])
    parser.add_argument("--rate", type=float, default=46.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    for watchers in given.watchers:
        cores, settles = measure(watchers, given.rate, given.seconds)
        print(f"{watchers:,} watchers, {settles:.0f} settles/s: {cores:.3f} cores of the broker")


if __name__ == "__main__":
    main()
