"""Reinforcement learning from feedback: feedback trains a reward model, whose scores train a language model.

What it shares with other workloads of language models is in `workloads.language`. Importing this package
imports nothing heavy; `pip install 'penstock-rl[rlhf]'` brings what the modules need.
"""

from penstock.config.workload import Workload

WORKLOAD = Workload(
    name="rlhf",
    environment="workloads.rlhf.language_environment:make",
    spaces="workloads.rlhf.language_environment:spaces",
    policy="workloads.language.policy.language_policy:build",
    defaults="workloads.rlhf.language_defaults:for_environment",
    target="workloads.rlhf.language_environment:target",
    model="workloads.language.language_model:make_model",
    generator="workloads.rlhf.response_generator:make_generator",
    runner="workloads.rlhf.response_evaluation:make_runner",
    places=("model", "prompts", "reward", "true_reward", "guard_rules", "guard_classifier"),
    unsent=("feedback", "conversations", "base_training", "begin_with", "critic"),
    algorithms={"token_ppo": "penstock.config.sections.token:TokenPPOSection"},
    commands={
        "reward": "workloads.rlhf.commands.reward_commands:reward_commands",
        "feedback": "workloads.rlhf.commands.feedback_commands:feedback_commands",
        "generate": "workloads.rlhf.commands.generate:generate",
    },
    prepare="workloads.rlhf.preparation:prepare",
    rehearse="workloads.rlhf.rehearsal:rehearse",
    services="workloads.rlhf.preparation:services",
    server="workloads.rlhf.text_server:make_server",
    artefacts="workloads.rlhf.artefacts:write",
    http="workloads.rlhf.policy_service:service",
)
