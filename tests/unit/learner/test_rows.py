from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.config.settings import CloneSection, ImpalaSection, PPOSection, ReinforceSection
from penstock.learner.algorithms.algorithm import Update, contained, culprits
from penstock.learner.algorithms.gradient import PLAIN, DenseNetwork, Hardware, Network
from penstock.learner.algorithms.ppo import PPO, Prepared
from penstock.learner.algorithms.registry import ALGORITHMS
from penstock.learner.algorithms.rows import RankGroup, Sequences, see
from penstock.learner.batch import Batch, assemble
from penstock.policy import weights
from penstock.policy.policy import Policy
from tests.support.experience.experience import Collector, Fragment, cartpoles, collect, same, small_policy
from tests.support.experience.remembering import Actor, batch_of, remembering

FRESH = PPOSection(epochs=1, minibatches=3, learning_rate=0.0)


def collected(policy: Policy, *lengths: int, **options: Any) -> Batch:
    actor = Actor(policy, **options)
    return batch_of([actor.fragment(steps) for steps in lengths])


def prepared(policy: Policy, batch: Batch) -> Prepared:
    with torch.no_grad():
        return PPO(policy, FRESH, seed=0).prepare(batch, batch.reward, RankGroup().rows_of(batch.valid))


def test_a_lost_recurrent_state_changes_the_result() -> None:
    policy = remembering(recurrent="lstm")
    batch = collected(policy, 8, 8, longest=40)
    forgotten = replace(batch, state={name: torch.zeros_like(one) for name, one in batch.state.items()})
    assert PPO(policy, FRESH, seed=0).update(forgotten, progress=0.0).metrics["max_ratio"] > 1.02


def test_steps_of_the_burn_in_carry_no_loss() -> None:
    policy = remembering(recurrent="gru", burn_in=4)
    batch = collected(policy, 8, 4, 6)
    kept = batch.valid.clone()
    kept[:4] = False
    rows = prepared(policy, batch).rows
    assert isinstance(rows, Sequences)
    assert rows.steps == int(kept.sum()) == 18
    assert len(rows) == int(kept.any(0).sum()) == 6
    assert [part.steps for part in rows.cut([(2, 2)] * 3)] == [8, 6, 4]


def test_a_batch_that_is_all_burn_in_is_skipped() -> None:
    policy = remembering(recurrent="gru", burn_in=4)
    ppo = PPO(policy, FRESH, seed=0)
    before = weights.encode(policy)
    update = ppo.update(collected(policy, 4, 3), progress=0.0)
    assert (update.applied, update.reason, update.steps) == (False, "empty", 0)
    assert weights.encode(policy) == before


def test_minibatches_hold_whole_columns_in_the_permuted_order() -> None:
    policy = remembering(recurrent="lstm")
    batch = collected(policy, 8, 5, slots=2)
    rows = prepared(policy, batch).rows
    with pytest.raises(ValueError, match="by whole sequences"):
        see(policy, batch).inputs.select(torch.tensor([0]))
    order = torch.tensor([2, 0, 3, 1])
    first, second = rows.select(order).cut([(2, 2)] * 2)
    expected = [batch.log_prob[:steps, column] for column, steps in ((2, 5), (0, 8), (3, 5), (1, 8))]
    torch.testing.assert_close(first.behaviour, torch.cat(expected[:2]))
    torch.testing.assert_close(second.behaviour, torch.cat(expected[2:]))
    chosen = [batch.action["action"][:steps, column] for column, steps in ((2, 5), (0, 8))]
    torch.testing.assert_close(first.action["action"], torch.cat(chosen))


def test_invalid_steps_do_not_matter_to_a_recurrent_policy() -> None:
    blobs = []
    for noise in (0.0, 1e3):
        policy = remembering(recurrent="lstm")
        batch = collected(policy, 8, 5)
        observation = batch.observation["observation"].clone()
        observation[6:, 3:] += noise
        changed = replace(batch, observation={"observation": observation})
        assert PPO(policy, PPOSection(minibatches=2), seed=0).update(changed, progress=0.0).applied
        blobs.append(weights.encode(policy))
    assert blobs[0] == blobs[1]


def test_frame_stacks_are_rows_like_others() -> None:
    policy = remembering(frame_stack=3, normalise_observations=True, activation="tanh")
    batch = collected(policy, 8, 8, masked=True)
    ppo = PPO(policy, FRESH, seed=0)
    assert isinstance(ppo._network, DenseNetwork)
    assert len(prepared(policy, batch).rows) == int(batch.valid.sum())
    assert ppo.update(batch, progress=0.0).metrics["max_ratio"] == pytest.approx(1.0, abs=1e-4)
    assert policy.normaliser is not None
    newest = batch.observation["observation"][:-1].flatten(0, 1).double()
    torch.testing.assert_close(policy.normaliser.mean[-3:], newest.mean(0))
    assert not np.allclose(policy.normaliser.mean[:3], policy.normaliser.mean[-3:])


@pytest.mark.parametrize("section", [{}, {"recurrent": "lstm"}])
def test_a_masked_action_keeps_probability_zero_while_others_learn(section: dict[str, Any]) -> None:
    policy = remembering(**section)
    batch = collected(policy, 8, 8, masked=True)
    mask = batch.observation["mask/action"].clone()
    mask[..., 2] = False
    mask[..., :2] |= ~mask.any(-1, keepdim=True)
    never = replace(batch, observation=batch.observation | {"mask/action": mask})
    action = batch.action["action"].clone()
    action[action == 2] = mask[:-1].float().argmax(-1)[action == 2]
    taken = torch.where(mask[:-1].gather(-1, action[..., None])[..., 0], action, mask[:-1].float().argmax(-1))
    before = policy.actor_head.weight.detach().clone()
    ppo = PPO(policy, PPOSection(epochs=2, minibatches=2, entropy_coefficient=0.01), seed=0)
    assert ppo.update(replace(never, action={"action": taken}), progress=0.0).applied
    assert torch.equal(policy.actor_head.weight[2], before[2])
    assert not torch.equal(policy.actor_head.weight[:2], before[:2])


COUNT = 6
SECTIONS = {"ppo": PPOSection, "impala": ImpalaSection, "reinforce": ReinforceSection, "clone": CloneSection}


def algorithm_of(name: str, policy: dict[str, Any] | None = None, **section: Any) -> Any:
    return ALGORITHMS[name](small_policy(**(policy or {})), SECTIONS[name](**section), seed=0)


def fragments() -> list[Fragment]:
    return [Collector(cartpoles(2), session).fragment(small_policy(), 8) for session in range(1, COUNT + 1)]


def containment_batch_of(parts: list[Fragment], without: Collection[int] = ()) -> Batch:
    numbered = [(number, part) for number, part in enumerate(parts, 1) if number not in without]
    places = [(number, 100) for number, _ in numbered]
    return assemble([part for _, part in numbered], torch.device("cpu"), places)


def spoiled(parts: list[Fragment], number: int, name: str, value: float) -> None:
    header, arrays = parts[number - 1]
    array = arrays[name].copy()
    array[1, 0] = value
    parts[number - 1] = (header, arrays | {name: array})


@pytest.mark.promise("update-fails-exception-number")
@pytest.mark.parametrize("name", SECTIONS)
def test_the_rest_is_trained_as_without_the_culprits(name: str) -> None:
    section: dict[str, Any] = {"value_coefficient": 0.5} if name == "clone" else {}
    parts, algorithm, other = fragments(), algorithm_of(name, **section), algorithm_of(name, **section)
    for number in (2, 5):
        spoiled(parts, number, "observation" if name == "clone" else "reward", np.inf)
    update = algorithm.update(containment_batch_of(parts), progress=0.0)
    assert update.applied
    assert update.culprits == {2: "nan", 5: "nan"}
    assert update.left_out == 2 * 8 * 2
    assert other.update(containment_batch_of(parts, without=(2, 5)), progress=0.0).steps == update.steps
    assert same(algorithm.state(), other.state())


def updated_with(algorithm: Any, name: str, value: float) -> Update:
    """Fragment 3 has that value in one place of a tensor."""
    parts = fragments()
    spoiled(parts, 3, name, value)
    update: Update = algorithm.update(containment_batch_of(parts), progress=0.0)
    return update


@pytest.mark.parametrize("value", [-60.0, -1e30, 60.0, 1e30])
def test_an_action_impossible_for_the_policy_is_implausible(value: float) -> None:
    update = updated_with(algorithm_of("ppo"), "log_prob", value)
    assert (update.applied, update.culprits) == (True, {3: "implausible"})


@pytest.mark.promise("metrics-overflow-metric-decides")
@pytest.mark.parametrize("name", ["ppo", "impala", "reinforce"])
@pytest.mark.parametrize("value", [-46.0, -1e6])
def test_an_accepted_log_ratio_overflows_no_metric(name: str, value: float) -> None:
    update = updated_with(algorithm_of(name, max_log_ratio=1e9), "log_prob", value)
    assert (update.applied, update.culprits) == (True, {})
    assert {"effective_sample_size", "max_ratio", "kl_behaviour"} <= update.metrics.keys()
    assert np.isfinite(list(update.metrics.values())).all()


@pytest.mark.parametrize("value", [-1.0, 2.0, 1e12])
@pytest.mark.parametrize("activation", ["tanh", "silu"])
@pytest.mark.parametrize("name", SECTIONS)
def test_an_invalid_choice_is_an_error(name: str, activation: str, value: float) -> None:
    update = updated_with(algorithm_of(name, {"activation": activation}), "action", value)
    assert (update.applied, update.culprits) == (True, {3: "error"})


def attempt_on(refuse: Callable[[set[int]], Exception | str]) -> Callable[..., Update]:
    """An update that fails with an exception or a reason, by the entries in its batch; notes nothing."""

    def attempt(batch: Batch, *, is_rehearsal: bool) -> Update:
        del is_rehearsal
        outcome = refuse({source.number for source in batch.sources})
        if isinstance(outcome, Exception):
            raise outcome
        return Update(
            applied=not outcome, reason=outcome, steps=len(batch.slots), gradient_steps=1, metrics={}
        )

    return attempt


@pytest.mark.promise("update-fails-exception-number")
def test_an_exception_is_attributed_to_its_fragment_too() -> None:
    attempt = attempt_on(lambda numbers: IndexError("2 is out of bounds") if 4 in numbers else "")
    update = contained(attempt, containment_batch_of(fragments()))
    assert (update.applied, update.culprits, update.steps) == (True, {4: "error"}, 10)


@pytest.mark.promise("failure-single-fragment-causes")
@pytest.mark.parametrize("most", [0, 3])
def test_an_exception_not_caused_by_a_fragment_is_raised(most: int) -> None:
    attempt = attempt_on(lambda numbers: RuntimeError("a bug") if len(numbers) > most else "")
    with pytest.raises(RuntimeError, match="a bug"):
        contained(attempt, containment_batch_of(fragments()))
    with pytest.raises(torch.OutOfMemoryError):
        contained(
            attempt_on(lambda _: torch.OutOfMemoryError("no memory")), containment_batch_of(fragments())
        )


@pytest.mark.promise("failure-single-fragment-causes")
def test_fragments_that_fail_only_together_have_no_culprit() -> None:
    attempt = attempt_on(lambda numbers: "nan" if {1, 6} <= numbers else "")
    update = contained(attempt, containment_batch_of(fragments()))
    assert (update.applied, update.reason, update.culprits) == (False, "nan", {})


def test_few_culprits_among_many_cost_few_trials() -> None:
    trials = 0

    def trial(part: Any) -> str:
        nonlocal trials
        trials += 1
        return "nan" if {100, 900} & set(part) else ""

    assert culprits(trial, range(1024)) == {100: "nan", 900: "nan"}
    assert trials <= 2 * 2 * 11


READS = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
)
"""Operations that wait for a GPU: a number is taken out, something is copied, a size depends on values."""


class Reads(TorchDispatchMode):
    """Counts READS."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func in READS
        return func(*args, **(kwargs or {}))


def make(hardware: Hardware = PLAIN, **section: Any) -> PPO:
    """A small PPO whose networks go through autograd, as they do on a GPU."""
    policy = small_policy(0, activation="silu", normalise_observations=True)
    return PPO(policy, PPOSection(**section), seed=0, hardware=hardware)


def reads(**section: Any) -> int:
    ppo = make(entropy_coefficient=0.01, value_clip=0.2, **section)
    batch = collect(ppo.policy)
    with Reads() as counted:
        assert ppo.update(batch, progress=0.0).applied
    return int(counted.count)


def test_no_gradient_step_reads_the_device() -> None:
    assert reads(epochs=1, minibatches=1) == reads(epochs=5, minibatches=4) > 0
    once, often = reads(epochs=1, target_kl=1e6), reads(epochs=4, target_kl=1e6)
    assert often - once == 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_no_gradient_step_waits_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    ppo = PPO(small_policy().to(device), PPOSection(), seed=0)
    train: Callable[..., Any] = ppo._train

    def strictly(*arguments: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return train(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(ppo, "_train", strictly)
    fragments = [Collector(cartpoles(2), 1).fragment(small_policy(), 16)]
    for _ in range(2):
        assert ppo.update(assemble(fragments, device), progress=0.0).applied


def first_gradient(hardware: Hardware) -> tuple[Batch, Tensor]:
    """Of one minibatch that is the whole batch."""
    ppo = make(hardware, epochs=1, minibatches=1, max_gradient_norm=0)
    batch = collect(small_policy(1))
    ppo.update(batch, progress=0.0)
    return batch, ppo._optimiser.flat_gradient.clone()


def test_mixed_precision_gives_nearly_the_same_gradient() -> None:
    _, exact = first_gradient(Hardware())
    _, rounded = first_gradient(Hardware(bfloat16=True))
    assert rounded.dtype is torch.float32
    assert not torch.equal(exact, rounded)
    assert float((exact - rounded).norm() / exact.norm()) < 0.05


def test_mixed_precision_does_not_change_ratios() -> None:
    ppo = make(Hardware(bfloat16=True), epochs=1, minibatches=1)
    assert ppo.update(collect(ppo.policy), progress=0.0).metrics["kl_proximal"] < 1e-8


def test_mixed_precision_and_compilation_go_through_autograd() -> None:
    for hardware, kind in (
        (Hardware(), DenseNetwork),
        (Hardware(bfloat16=True), Network),
        (Hardware(compiled=True), Network),
    ):
        ppo = PPO(small_policy(), PPOSection(), seed=0, hardware=hardware)
        assert type(ppo._network) is kind


@pytest.mark.slow
def test_compiled_networks_learn_the_same() -> None:
    results = []
    for compiled in (False, True):
        ppo = make(Hardware(compiled=compiled), learning_rate=1e-3)
        for steps in (16, 11, 23):
            assert ppo.update(collect(small_policy(1), steps=steps), progress=0.0).applied
        results.append(weights.snapshot(ppo.policy))
    for name, array in results[0].items():
        torch.testing.assert_close(
            torch.from_numpy(array), torch.from_numpy(results[1][name]), rtol=1e-4, atol=1e-5
        )
