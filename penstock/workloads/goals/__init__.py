"""Goals: learn from logs of tasks, and which goal a live system should have next.

Importing this package imports nothing heavy.
"""

from penstock.config.workload import Workload

WORKLOAD = Workload(
    name="goals",
    environment="penstock.workloads.control.environment:make",
    spaces="penstock.workloads.control.environment:spaces",
    environments={
        "Goals-v0": "penstock.workloads.goals.tasks",
        "Traces-v0": "penstock.workloads.goals.tasks",
    },
    target="penstock.workloads.goals.live_host:target",
    defaults="penstock.workloads.goals.goals_defaults:for_environment",
    policy="penstock.policy.build:build",
    acting="penstock.policy.acting_build:build_acting",
    model="penstock.workloads.plugin.learning:make_step_model",
    generator="penstock.workloads.plugin.acting:make_step_generator",
    runner="penstock.workloads.plugin.acting:make_step_runner",
    places=("goals", "trace_file"),
    prepare="penstock.workloads.goals.live_host:prepare",
    rehearse="penstock.workloads.goals.live_host:rehearse",
    http="penstock.workloads.goals.http.goals_service:service",
    commands={
        "inject": "penstock.workloads.goals.commands.inject_command:inject",
        "traces": "penstock.workloads.goals.commands.trace_commands:trace_commands",
    },
)
