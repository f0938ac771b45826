"""What a watch and an append cost the one thread of Redis, by the number of open sessions.

    python -m benchmarks.script_cost [--sessions 10 1000] [--batches 40] [--together 200]

Microseconds as Redis counts them (`INFO commandstats`), the median and the least of batches of calls: a call
that another process interrupts counts in one batch only. Half of the sessions have credit, the others wait
for it. With `--together 1` each call waits for the answer to the one before, so Redis is idle in between and
other processes displace what it had in the processor's caches; a busy Redis finds many calls at once.
"""

import argparse
import statistics
from collections.abc import Sequence
from typing import Any, Final

import redis

from benchmarks.credit_stand import CHARGE
from benchmarks.services import services
from broker.log import keys
from broker.log.envelope import unpack
from broker.log.learner_log import LearnerLog
from broker.log.learner_records import Pacing
from broker.log.script import load
from penstock.wire.limits import STAGING_EXPIRY_S

CALLS: Final = 200
PAYLOAD: Final = bytes(1024)
HEADER: Final = bytes(200)


class Sessions:
    """A run with so many rollout sessions, on an emptied server."""

    def __init__(self, client: Any, url: str, count: int) -> None:
        client.flushall()
        self._redis, self._log = client, LearnerLog.connect(url, wait_s=5.0)
        self._log.acquire("run", "learner", 10**9)
        pacing = Pacing(
            budget=max(2, count // 2) * CHARGE,
            fragment_charge=CHARGE,
            actor_count=1,
            lock_step=False,
            session_timeout_ms=10**9,
            max_log_bytes=2**40,
            max_log_entries=2**30,
        )
        self._log.start(b"specification", pacing)
        self._log.publish(b"weights", update=0, settled=0, scalars={})
        for name in ("watch", "append"):
            client.script_load(load(name).source)
        self.open = [int(self.run("open_session", f"actor-{index}", 1, "")[1]) for index in range(count)]
        self.acked = dict.fromkeys(self.open, 0)

    def close(self) -> None:
        """Let go of the learner's connection."""
        self._log.close()

    def run(self, name: str, *arguments: Any) -> Any:
        """Return the reply of a script without keys."""
        return unpack(self._redis.eval(load(name).source, 0, *arguments, ""))[1]

    def watch(self, sessions: Sequence[int]) -> None:
        """One look for each, as held calls of a broker take it."""
        looks = self._redis.pipeline(transaction=False)
        for session in sessions:
            looks.evalsha(load("watch").sha1, 0, session, self.acked[session], 0, "", 0, 0, "")
        looks.execute()

    def append(self, sessions: Sequence[int]) -> None:
        """One fragment of each."""
        appends = self._redis.pipeline(transaction=False)
        for session in sessions:
            key, acked = f"{keys.STAGING}{session}", self.acked[session]
            fragment = (acked + 1, CHARGE, 1, len(PAYLOAD), HEADER, 1)
            appends.set(key, PAYLOAD, ex=STAGING_EXPIRY_S)
            appends.evalsha(load("append").sha1, 1, key, session, acked, *fragment, "")
        for session, reply in zip(sessions, appends.execute()[1::2], strict=True):
            self.acked[session] = int(unpack(reply)[1][2])

    def settle(self) -> None:
        """The learner has consumed all that is there."""
        self._log.settle(self._log.renew().head)


def per_call_us(client: Any) -> float:
    """Return microseconds of a script since the counters were reset."""
    found = client.info("commandstats")["cmdstat_evalsha"]
    return float(found["usec"]) / int(found["calls"])


def measure(
    client: Any, url: str, count: int, batches: int, together: int
) -> tuple[list[float], list[float]]:
    """Return microseconds of a watch and of an append, by batch."""
    run = Sessions(client, url, count)
    watches: list[float] = []
    appends: list[float] = []
    for batch in range(batches):
        chosen = [run.open[(batch * CALLS + index) % count] for index in range(CALLS)]
        for call, found in ((run.watch, watches), (run.append, appends)):
            client.config_resetstat()
            for first in range(0, CALLS, together):
                call(chosen[first : first + together])
            found.append(per_call_us(client))
        run.settle()
    run.close()
    return watches, appends


def main() -> None:
    """Print a line for each number of sessions."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.script_cost", description=__doc__)
    parser.add_argument("--sessions", type=int, nargs="+", default=[10, 1000])
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--together", type=int, default=CALLS)
    given = parser.parse_args()
    with services(durability="memory", broker=False) as here, redis.Redis.from_url(here.redis_url) as client:
        for count in given.sessions:
            # A session has one append under way at a time.
            together = min(given.together, count)
            found = measure(client, here.redis_url, count, given.batches, together)
            watch, append = (f"{statistics.median(each):.1f} us (least {min(each):.1f})" for each in found)
            print(f"{count:,} sessions: watch {watch}, append {append}")


if __name__ == "__main__":
    main()
