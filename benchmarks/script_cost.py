"""What a watch and an append cost the one thread of Redis, by the number of open sessions.

    python -m benchmarks.script_cost [--sessions 10 1000] [--batches 40]

Microseconds as Redis counts them (`INFO commandstats`), the median of batches of calls: a call that another
process interrupts counts in one batch only. Half of the sessions have credit, the others wait for it.
"""

import argparse
import statistics
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
        self.open = [int(self.run("open_session", f"actor-{index}", 1, "")[1]) for index in range(count)]
        self.acked = dict.fromkeys(self.open, 0)

    def close(self) -> None:
        """Let go of the learner's connection."""
        self._log.close()

    def run(self, name: str, *arguments: Any, staged: tuple[str, ...] = ()) -> Any:
        """Return the reply of a script."""
        given = (load(name).sha1, len(staged), *staged, *arguments, "")
        try:
            return unpack(self._redis.evalsha(*given))[1]
        except redis.exceptions.NoScriptError:
            return unpack(self._redis.eval(load(name).source, *given[1:]))[1]

    def watch(self, session: int) -> None:
        """One look, as a held call of a broker takes it."""
        self.run("watch", session, self.acked[session], 0, "", 0, 0)

    def append(self, session: int) -> None:
        """One fragment, and the learner settles behind it."""
        key = f"{keys.STAGING}{session}"
        self._redis.set(key, PAYLOAD, ex=STAGING_EXPIRY_S)
        fragment = (self.acked[session] + 1, CHARGE, 1, len(PAYLOAD), HEADER, 1)
        reply = self.run("append", session, self.acked[session], *fragment, staged=(key,))
        self.acked[session] = int(reply[2])

    def settle(self) -> None:
        """The learner has consumed all that is there."""
        self._log.settle(self._log.renew().head)


def per_call_us(client: Any) -> float:
    """Return microseconds of a script since the counters were reset."""
    found = client.info("commandstats")["cmdstat_evalsha"]
    return float(found["usec"]) / int(found["calls"])


def measure(client: Any, url: str, count: int, batches: int) -> tuple[float, float]:
    """Return microseconds of a watch and of an append."""
    run, watches, appends = Sessions(client, url, count), [], []
    for batch in range(batches):
        chosen = [run.open[(batch * CALLS + index) % count] for index in range(CALLS)]
        client.config_resetstat()
        for session in chosen:
            run.watch(session)
        watches.append(per_call_us(client))
        client.config_resetstat()
        for session in chosen:
            run.append(session)
        appends.append(per_call_us(client))
        run.settle()
    run.close()
    return statistics.median(watches), statistics.median(appends)


def main() -> None:
    """Print a line for each number of sessions."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.script_cost", description=__doc__)
    parser.add_argument("--sessions", type=int, nargs="+", default=[10, 1000])
    parser.add_argument("--batches", type=int, default=40)
    given = parser.parse_args()
    with services(durability="memory", broker=False) as here, redis.Redis.from_url(here.redis_url) as client:
        for count in given.sessions:
            watch, append = measure(client, here.redis_url, count, given.batches)
            print(f"{count:,} sessions: watch {watch:.1f} us, append {append:.1f} us")


if __name__ == "__main__":
    main()
