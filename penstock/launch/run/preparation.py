"""What a run's workload makes before the processes start."""

from collections.abc import Callable
from dataclasses import replace

from penstock.config.preparation import Progress
from penstock.config.workload import find, load
from penstock.launch.run.plan import Plan
from penstock.runtime.lifecycle import Lifecycle


def prepared(plan: Plan, lifecycle: Lifecycle, say: Callable[[str], None]) -> Plan:
    """The plan with everything made; raises ConfigurationError, Interrupted when the process drains first."""
    path = find(plan.settings.workload).prepare
    if not path:
        return plan
    progress = Progress(say, lifecycle.draining)
    return replace(plan, settings=load(path)(plan.settings, plan.run_dir, progress))
