"""What generates thoughts, to train or to measure: the task, its rows, and the model under newest weights."""

from dataclasses import dataclass

import torch

from penstock.workloads.language.quiet import quieten
from penstock.workloads.plugin.acting import LocalPolicy, Run
from penstock.workloads.thoughts.tasks.example import Task
from penstock.workloads.thoughts.thinking_model import ThinkingModel
from penstock.workloads.thoughts.thought_environment import task_of
from penstock.workloads.thoughts.thought_layout import Layout
from penstock.workloads.thoughts.thought_section import Thoughts, thoughts_section


@dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtEquipment:
    """Of one run."""

    section: Thoughts
    task: Task
    layout: Layout
    local: LocalPolicy
    model: ThinkingModel


def equip_thoughts(of: Run) -> ThoughtEquipment:
    """Return what a run needs, from the places of this machine; raises ConfigurationError."""
    quieten()
    torch.set_num_threads(of.actor.threads)
    task, layout = task_of(of.environment)
    local = of.make_policy(of.specification.seed)
    network = local.policy.network  # type: ignore[attr-defined] # a LanguagePolicy
    return ThoughtEquipment(
        section=thoughts_section(of.environment),
        task=task,
        layout=layout,
        local=local,
        model=ThinkingModel(network, layout),
    )
