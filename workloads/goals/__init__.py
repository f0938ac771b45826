"""Goals: learn from logs of tasks, and which goal a live system should have next.

Importing this package imports nothing heavy.
"""

from penstock.config.workload import Workload

WORKLOAD = Workload(
    name="goals",
    environment="workloads.control.environment:make",
    spaces="workloads.control.environment:spaces",
    target="workloads.goals.live_host:target",
    defaults="workloads.goals.goals_defaults:for_environment",
    policy="penstock.policy.build:build",
    acting="penstock.policy.acting_build:build_acting",
    model="workloads.plugin.learning:make_step_model",
    generator="workloads.plugin.acting:make_step_generator",
    runner="workloads.plugin.acting:make_step_runner",
    places=("goals", "trace_file"),
    prepare="workloads.goals.live_host:prepare",
    rehearse="workloads.goals.live_host:rehearse",
    http="workloads.goals.http.goals_service:service",
    commands={
        "inject": "workloads.goals.commands.inject_command:inject",
        "traces": "workloads.goals.commands.trace_commands:trace_commands",
    },
)
