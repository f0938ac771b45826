"""Reinforcement learning from human feedback: a reward model's scores train a language model."""

from penstock.config.workload import Workload

WORKLOAD = Workload(
    name="rlhf",
    environment="penstock.workloads.rlhf.environment:make",
    spaces="penstock.workloads.rlhf.environment:spaces",
    policy="penstock.workloads.language.policy:build",
    defaults="penstock.workloads.rlhf.environment:for_environment",
    target="penstock.workloads.rlhf.environment:target",
    model="penstock.workloads.language.language_model:make_model",
    generator="penstock.workloads.rlhf.responses:make_generator",
    runner="penstock.workloads.rlhf.responses:make_runner",
    places=("model", "prompts", "reward", "true_reward", "guard_rules", "guard_classifier"),
    unsent=("feedback", "conversations", "base_training", "begin_with", "critic"),
    algorithms={"token_ppo": "penstock.config.algorithm_sections:TokenPPOSection"},
    commands={"rlhf": "penstock.workloads.rlhf.commands:rlhf_commands"},
    moved_commands={name: f"rlhf {name}" for name in ("feedback", "generate", "reward")},
    prepare="penstock.workloads.rlhf.preparation:prepare",
    rehearse="penstock.workloads.rlhf.preparation:rehearse",
    services="penstock.workloads.rlhf.preparation:services",
    server="penstock.workloads.rlhf.responses:make_server",
    artefacts="penstock.workloads.rlhf.artefacts:write",
    http="penstock.workloads.rlhf.policy_service:service",
)
