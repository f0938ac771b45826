"""Control: any Gymnasium environment with fixed-size observations and actions, one forward pass a step."""

from penstock.config.workload import Workload

WORKLOAD = Workload(
    name="control",
    default=True,
    environment="workloads.control.environment:make",
    spaces="workloads.control.environment:spaces",
    policy="penstock.policy.build:build",
    acting="penstock.policy.acting_build:build_acting",
    defaults="workloads.control.defaults:for_environment",
    target="workloads.control.environment:target",
    model="workloads.plugin.learning:make_step_model",
    generator="workloads.plugin.acting:make_step_generator",
    runner="workloads.plugin.acting:make_step_runner",
)
