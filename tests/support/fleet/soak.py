"""`make soak`: a whole run under fire for as long as wanted, its books audited all along.

    python -m tests.support.fleet.soak [--minutes 30] [--seed N] [--report FILE.json] [--keep DIR]
    python -m tests.support.fleet.soak --scenario overload|full|absent [--minutes 10] ...

All four roles are killed with `kill -9`, at fail points and at random moments (Redis also while it rewrites
its file, and with its last second gone), and frozen with SIGSTOP for a while, some to be killed in their
sleep. Actors hang now and then, until they are killed: they keep their session and end no fragment. Half of
the actors reach their broker through a network that delays, loses replies, resets, holds, or is very slow.
One actor spoils every second fragment, in one way after the other. Every few minutes, and at the end, once
with Redis running and once from its files alone, `penstock audit` must find nothing, and the books must
name of the spoiled fragments all that can be known, and nothing honest. The seed that it prints names every
life's end and every fault of the network: `--seed` replays them.

The other scenarios are flows (see `tests/support/fleet/flow_scenarios.py`): nothing is drawn there, and the
seed only names the report.
"""

import argparse
import json
import random
import secrets
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from tests.support.fleet.campaign import WAYS, Campaign, Pace
from tests.support.fleet.fleet import Fleet, Shape
from tests.support.fleet.flow_scenarios import FLOWS, Report
from tests.support.network.proxy import Proxy

AUDITS: Final = 6
"""With everybody alive, spread over the soak; two more at its end."""
PACES: Final = {
    "actor": Pace(shortest_s=1, longest_s=10, at_points=0.4, freezes=0.15),
    "broker": Pace(shortest_s=2, longest_s=15, at_points=0.4, freezes=0.15),
    "learner": Pace(shortest_s=4, longest_s=20, at_points=0.5, freezes=0.1),
    "redis": Pace(shortest_s=5, longest_s=30, freezes=0.15, ways=tuple(WAYS)),
}
SHAPE: Final = Shape(
    actors=4,
    brokers=2,
    settings=("learner.lease_ttl_s=3", "broker.session_timeout_s=6", "algorithm.batch_steps=256"),
    actor_options=("--count", "2", "--hangs", "0.005"),
    poisoners=1,
)
NETWORK: Final[dict[str, dict[str, Any]]] = {
    "calm": {},
    "lost replies": {"lose_replies": 0.3},
    "delay": {"delay_s": 0.2, "jitter_s": 0.1},
    "resets": {"reset": 0.01},
    "thin line": {"bytes_per_s": 125_000.0},
    "slow line": {"bytes_per_s": 8_000.0, "delay_s": 0.1},
    "black hole": {"blackhole": True},
    "refused": {"refuse": True},
}
KILLS_PER_MINUTE: Final = 18
"""At least; lives are cut short when there were fewer."""
NETWORK_EVERY_S: Final = 7.0
RECOVERY_S: Final = 180.0
"""Until all serve again: a connection whose far side has vanished is given up by keepalive, after 80 s."""


class Soak:
    """One soak; `run` writes the report whatever happens."""

    def __init__(self, folder: Path, *, seed: int, seconds: float, report: Report) -> None:
        self._folder, self._seed, self._seconds, self._report = folder, seed, seconds, report
        self._proxies: list[Proxy] = []

    def run(self) -> None:
        """Raises AssertionError for whatever does not hold."""
        with ExitStack() as stack:
            proxied = self._proxied(stack)
            fleet = stack.enter_context(Fleet(self._folder, SHAPE, through=lambda at: next(proxied)(at)))
            campaign = Campaign(fleet, tuple(fleet.members), seed=self._seed, paces=PACES)
            self._report.follow(fleet)
            self._under_fire(fleet, campaign)
            self._calm(campaign)
            self._report.audit("at the end", fleet.finish())
            self._report.figures["booked"] = fleet.check_poison()
            self._report.audit("from the files", fleet.audit(running=False))
        fleet.log.check_busy()

    def _under_fire(self, fleet: Fleet, campaign: Campaign) -> None:
        began = time.monotonic()
        weather = random.Random(f"{self._seed}/network")
        network_s, audits = began, 1
        campaign.begin()
        while (elapsed := time.monotonic() - began) < self._seconds:
            campaign.behind = campaign.visit() < elapsed * KILLS_PER_MINUTE / 60
            fleet.check()
            if time.monotonic() >= network_s:
                network_s += NETWORK_EVERY_S
                self._change(weather)
            if elapsed >= audits * self._seconds / (AUDITS + 1):
                audits += 1
                self._calm(campaign)
                self._report.audit(f"after {elapsed:.0f} s", fleet.audit())
                fleet.check_poison()
                self._say(fleet, elapsed)
            fleet.pause()

    def _calm(self, campaign: Campaign) -> None:
        for proxy in self._proxies:
            proxy.heal()
        campaign.end(within_s=RECOVERY_S)

    def _change(self, weather: random.Random) -> None:
        for proxy in self._proxies:
            proxy.heal()
            name = weather.choice(tuple(NETWORK))
            proxy.set(**NETWORK[name])
            self._report.note_weather(name)
            if weather.random() < 0.1:
                weather.choice((proxy.reset, proxy.half_open))()

    def _proxied(self, stack: ExitStack) -> Iterator[Callable[[str], str]]:
        while True:
            yield from (str, self._through(stack), self._through(stack), str)

    def _through(self, stack: ExitStack) -> Callable[[str], str]:
        def behind_a_proxy(address: str) -> str:
            self._proxies.append(stack.enter_context(Proxy(address, seed=self._seed + len(self._proxies))))
            return self._proxies[-1].address

        return behind_a_proxy

    def _say(self, fleet: Fleet, elapsed: float) -> None:
        sys.stdout.write(f"{elapsed:6.0f} s: {len(fleet.log)} kills, books balance\n")
        sys.stdout.flush()


def main() -> int:
    """Exit code: 0 when nothing was found."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--scenario", choices=["kills", *FLOWS], default="kills")
    parser.add_argument("--minutes", type=float, help="default: 30; of a flow 10")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    parser.add_argument("--report", type=Path, help="default: in runs/, named by scenario and seed")
    parser.add_argument("--keep", type=Path, help="run in this new folder and keep it")
    given = parser.parse_args()
    flow = FLOWS.get(given.scenario)
    minutes = given.minutes or (10.0 if flow else 30.0)
    sys.stdout.write(f"soak: {given.scenario}, seed {given.seed}, {minutes:g} minutes\n")
    sys.stdout.flush()
    folder = given.keep or Path(tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    report = Report(scenario=given.scenario, seed=given.seed, minutes=minutes)
    try:
        if flow:
            flow(folder, 60 * minutes, report)
        else:
            Soak(folder, seed=given.seed, seconds=60 * minutes, report=report).run()
        report.failure = ""
    except AssertionError as error:
        report.failure = str(error) or traceback.format_exc()
    finally:
        name = f"soak-{given.scenario}-{given.seed}" if flow else f"soak-{given.seed}"
        target = given.report or Path("runs") / f"{name}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(report.to_json(), indent=2) + "\n")
        sys.stdout.write(f"{report.summary()}\n{target}\n")
    if report.failure:
        sys.stderr.write(
            f"soak {given.scenario} {given.seed} failed: {report.failure}\nits records are in {folder}\n"
        )
        return 1
    if given.keep is None:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
