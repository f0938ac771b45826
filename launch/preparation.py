"""What a run's workload makes before the processes start, and where this machine has what the run names."""

from collections.abc import Callable
from dataclasses import replace

from launch.plan import Plan
from penstock.runtime.lifecycle import Lifecycle
from penstock.runtime.settings import ActorSection, Settings
from penstock.runtime.workload import Progress, Workload, find, load


def prepared(plan: Plan, lifecycle: Lifecycle, say: Callable[[str], None]) -> Plan:
    """The plan with everything made; raises ConfigurationError, Interrupted when the process drains first."""
    workload, settings = find(plan.settings.workload), plan.settings
    if workload.prepare:
        settings = load(workload.prepare)(settings, plan.run_dir, Progress(say, lifecycle.draining))
    return replace(plan, settings=settings.model_copy(update={"actor": _with_places(settings, workload)}))


def _with_places(settings: Settings, workload: Workload) -> ActorSection:
    """The user named these places here, so the actors that we start may use them."""
    named = {**settings.policy.kwargs, **settings.environment.kwargs}
    places = {key: str(named[key]) for key in workload.places if named.get(key)}
    return settings.actor.model_copy(update={"places": {**places, **settings.actor.places}})
