"""Acting in a run: reading its specification, generating fragments, playing an evaluation.

read               a specification as a `Run`: its sections with this machine's places, its spaces checked
Run                makes environments and policies
LocalPolicy        a policy and the publication of its weights
Session            an open session with the broker: newest weights, credit, seeds
Played             one evaluated episode
FragmentGenerator  protocol of the result of a record's `generator`: generates fragments
Generator          its base class, for a policy in this process
Runner             base class of the result of a record's `runner`: plays evaluations; Playing: how
GENERATING         name under which health watches the steps of a generator

action_seed, environment_seeds, place_of   seeds and place of one actor's session, equal in equal runs
watch, note_lag                            let health watch steps and weights
policy_maker                               makes the policy of a run, without its environments
make_step_generator, make_step_runner      for workloads with one forward pass per step of environments
"""

from penstock.actor.evaluator import Played, Playing, Runner
from penstock.actor.evaluator import make_runner as make_step_runner
from penstock.actor.link.session import Session
from penstock.actor.rollout.generator import Generator, action_seed, environment_seeds, place_of
from penstock.actor.rollout.generator import make_generator as make_step_generator
from penstock.actor.rollout.loop import ENVIRONMENT as GENERATING
from penstock.actor.rollout.loop import FragmentGenerator, note_lag, watch
from penstock.actor.specification import LocalPolicy, Run, policy_maker, read

__all__ = [
    "GENERATING",
    "FragmentGenerator",
    "Generator",
    "LocalPolicy",
    "Played",
    "Playing",
    "Run",
    "Runner",
    "Session",
    "action_seed",
    "environment_seeds",
    "make_step_generator",
    "make_step_runner",
    "note_lag",
    "place_of",
    "policy_maker",
    "read",
    "watch",
]
