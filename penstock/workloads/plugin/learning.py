"""Learning: the model that a learner trains, and the algorithm that trains it.

    Model             algorithm, specification, probe and pacing of a run
    Algorithm         base class of every algorithm; `AlgorithmState`, `Batch`, `Update`: its values
    LearnsOnce        base class of those that learn from each batch once, with bounded staleness
    contained, verdict   an update without the fragments that make it fail; the reason against keeping one
    factor, warmup, decayed   schedules: of a rate over a run, over first updates, of a weight by update
    Trained, FlatAdam base class with checkpoints of modules and optimisers by name; Adam of one vector
    copies, load_copies, under, taken_over   tensors of a checkpoint by path, and back
    RankGroup, Hardware   the ranks that share an update; the precision and the compilation of its networks
    AlgorithmMaker    makes an algorithm of a policy and the section of `algorithm.name`
    TokenPPO          PPO of a policy over token sequences (`penstock.policy.tokens.TokenPolicy`)

    make_step_model   the model of a workload that acts step by step, with its own algorithms if any
    choose            the algorithm of a section, among those of a workload
    hardware_of       the hardware of the settings
    target_of         the mean return that counts as solved
    model_of          the model of an algorithm that a workload has made

A record's `model` is a function (Settings, Workload, RankGroup, torch device) → `Model`. An algorithm is
named by its settings section, which the record's `algorithms` adds to the configuration.
"""

from penstock.learner.algorithms.algorithm import (
    Algorithm,
    AlgorithmState,
    LearnsOnce,
    Trained,
    Update,
    contained,
    copies,
    load_copies,
    taken_over,
    under,
    verdict,
)
from penstock.learner.algorithms.gradient import FlatAdam, Hardware, hardware_of
from penstock.learner.algorithms.losses import decayed, factor, warmup
from penstock.learner.algorithms.registry import HardwareMaker as AlgorithmMaker
from penstock.learner.algorithms.registry import choose
from penstock.learner.algorithms.rows import RankGroup
from penstock.learner.algorithms.token_ppo import TokenPPO
from penstock.learner.batch import Batch
from penstock.learner.model import Model, make_step_model, model_of, target_of

__all__ = [
    "Algorithm",
    "AlgorithmMaker",
    "AlgorithmState",
    "Batch",
    "FlatAdam",
    "Hardware",
    "LearnsOnce",
    "Model",
    "RankGroup",
    "TokenPPO",
    "Trained",
    "Update",
    "choose",
    "contained",
    "copies",
    "decayed",
    "factor",
    "hardware_of",
    "load_copies",
    "make_step_model",
    "model_of",
    "taken_over",
    "target_of",
    "under",
    "verdict",
    "warmup",
]
