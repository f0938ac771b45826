"""Chat: a model that gets better by what people say of it, and falls back when it gets worse.

Importing this package imports nothing heavy.
"""

from penstock.config.workload import Workload

WORKLOAD = Workload(
    name="chat",
    environment="workloads.control.environment:make",
    spaces="workloads.control.environment:spaces",
    target="workloads.control.environment:target",
    defaults="workloads.chat.chat_defaults:for_environment",
    policy="penstock.policy.build:build",
    acting="penstock.policy.acting_build:build_acting",
    model="workloads.plugin.learning:make_step_model",
    generator="workloads.plugin.acting:make_step_generator",
    runner="workloads.plugin.acting:make_step_runner",
    site="workloads.chat.http.chat_site:site",
    commands={"chat": "workloads.chat.commands.chat_commands:chat_commands"},
)
