"""`penstock inject`: goals that a served policy proposes, carried out where the rules allow it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.runtime.foreground import AsJson, Assignments, ConfigFile, Insecure, finish, in_foreground

if TYPE_CHECKING:
    from penstock.config.settings import Settings
    from penstock.runtime.lifecycle import Lifecycle


def inject(
    folder: Annotated[
        Path, typer.Option("--folder", metavar="DIR", help="Of what was proposed and what became of it.")
    ] = Path("injector"),
    server: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Policy server, HOST:PORT or unix:/path.")
    ] = "127.0.0.1:50052",
    policy: Annotated[str, typer.Option(help="Which policy of the server.")] = "default",
    goals: Annotated[
        Path | None, typer.Option("--goals", metavar="FILE", help="Goals that are commands.")
    ] = None,
    simulated: Annotated[
        int | None, typer.Option(min=0, metavar="SEED", help="The simulated host instead of commands.")
    ] = None,
    auto: Annotated[
        bool, typer.Option("--auto", help="Carry goals out; without it they are only proposed.")
    ] = False,
    threshold: Annotated[
        float, typer.Option(min=0, max=1, help="Least certainty π(a) of a goal that is carried out.")
    ] = 0.7,
    explore: Annotated[
        float, typer.Option(min=0, max=1, help="Share of safe goals below the threshold that are tried.")
    ] = 0.02,
    interval: Annotated[
        float, typer.Option(min=0, max=86_400, help="Seconds from one decision to the next.")
    ] = 30.0,
    quiet: Annotated[
        list[str] | None,
        typer.Option(metavar="HH:MM-HH:MM", help="Local hours without goals; may be repeated."),
    ] = None,
    daily_limit: Annotated[int, typer.Option(min=0, max=100_000, help="Most goals of a day.")] = 1000,
    veto_s: Annotated[
        float, typer.Option("--veto-s", min=0, max=3600, help="Seconds in which a goal may be vetoed.")
    ] = 0.0,
    steps: Annotated[int, typer.Option(min=0, help="Intervals after which it ends; 0: it goes on.")] = 0,
    client_key: Annotated[str, typer.Option(help="This host's name for the server.")] = "injector",
    seed: Annotated[int | None, typer.Option(min=0, help="Of what is tried below the threshold.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on although it had stopped itself.")] = False,
    veto: Annotated[
        str | None, typer.Option(metavar="GOAL_ID", help="Forbid a goal that was proposed, and end.")
    ] = None,
    switch: Annotated[
        str | None,
        typer.Option(metavar="on|off", help="Carry goals out from now on, or only propose them, and end."),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Say why goals were not injected and what became of others, and end."),
    ] = False,
    config: ConfigFile = None,
    assignments: Assignments = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Propose goals by a served policy, carry them out, and tell the server what became of them."""
    if veto is not None or switch is not None or explain:

        def at_once() -> int:
            from penstock.workloads.goals.commands.injection import once

            return once(folder, wanted=switch, forbidden=veto, as_json=as_json)

        finish(at_once)

    def body(lifecycle: "Lifecycle", settings: "Settings") -> int:
        import numpy as np

        from penstock.workloads.goals.commands import injection
        from penstock.workloads.goals.injector.injection_journal import (
            AutoSwitch,
            InjectionJournal,
            InjectionRules,
        )
        from penstock.workloads.goals.injector.injector import AskedPolicy, Gate, Injector

        executor, safe = injection.executor_of(goals, simulated)
        gate = Gate(threshold=threshold, explore=explore, safe=safe)
        hours = injection.quiet_hours(quiet or ())
        rules = InjectionRules(interval_s=interval, daily_limit=daily_limit, quiet=hours, veto_s=veto_s)
        with (
            injection.client_of(settings, server, policy) as client,
            InjectionJournal.held(folder) as journal,
            lifecycle.calling_on_drain(client.close),
        ):
            injection.tell_switch(folder, auto=auto)
            since = journal.start_again(allowed=resume)
            injector = Injector(
                policy=AskedPolicy(client, client_key, executor.goals), executor=executor, journal=journal,
                switch=AutoSwitch(folder, default=auto), gate=gate, rules=rules,
                random=np.random.default_rng(seed), pause=lifecycle.draining.wait,
                draining=lifecycle.draining.is_set, drift_since=since,
            )  # fmt: skip
            return injection.work(injector, steps, as_json=as_json)

    in_foreground("injector", body, config, assignments, None, insecure=insecure)
