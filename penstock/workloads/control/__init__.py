"""Control: any Gymnasium environment with fixed-size observations and actions, one forward pass a step."""

from typing import Final

from penstock.config.workload import Workload

TASKS: Final = "penstock.workloads.control.tasks"
"""Module of the tasks of this package."""
SHIPPED: Final = ("Catch-v0", "Courier-v0", "Recall-v0", "Menu-v0")
"""Their ids."""
WORKLOAD = Workload(
    name="control",
    default=True,
    environment="penstock.workloads.control.environment:make",
    spaces="penstock.workloads.control.environment:spaces",
    environments=dict.fromkeys(SHIPPED, TASKS),
    acting="penstock.policy.acting_build:build_acting",
    defaults="penstock.workloads.control.defaults:for_environment",
    target="penstock.workloads.control.environment:target",
)
