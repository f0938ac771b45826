"""Chat: a model that gets better by what people say of it, and falls back when it gets worse.

Importing this package imports nothing heavy.
"""

from penstock.config.workload import Workload

WORKLOAD = Workload(
    name="chat",
    environment="penstock.workloads.control.environment:make",
    spaces="penstock.workloads.control.environment:spaces",
    environments={
        "Chat-v0": "penstock.workloads.chat.tasks",
        "Candidates-v0": "penstock.workloads.chat.tasks",
    },
    target="penstock.workloads.control.environment:target",
    defaults="penstock.workloads.chat.chat_defaults:for_environment",
    policy="penstock.policy.build:build",
    acting="penstock.policy.acting_build:build_acting",
    model="penstock.workloads.plugin.learning:make_step_model",
    generator="penstock.workloads.plugin.acting:make_step_generator",
    runner="penstock.workloads.plugin.acting:make_step_runner",
    site="penstock.workloads.chat.http.chat_site:site",
    commands={"chat": "penstock.workloads.chat.commands.chat_commands:chat_commands"},
)
