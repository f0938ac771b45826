"""Sequences at once against cells one step after another, written here from their definition."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.learner.algorithms.rows import see
from penstock.learner.batch import Batch
from penstock.policy.policy import Policy
from penstock.policy.recurrent import Core, unroll
from tests.support.experience.remembering import Actor, batch_of, remembering

T, B, F, H = 7, 4, 3, 5
KINDS = ["lstm", "gru"]


def cell_of(core: Core) -> nn.LSTMCell | nn.GRUCell:
    """A cell with the core's weights."""
    kind = nn.LSTMCell if isinstance(core.rnn, nn.LSTM) else nn.GRUCell
    cell: Any = kind(core.rnn.input_size, core.size, dtype=torch.float64)
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        setattr(cell, name, getattr(core.rnn, f"{name}_l0"))
    return cell  # type: ignore[no-any-return]


def step(cell: Any, rows: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The new h, then what else is kept."""
    result = cell(rows, state if len(state) > 1 else state[0])
    return result if isinstance(result, tuple) else (result,)


def made(kind: Any) -> tuple[Core, Tensor, dict[str, Tensor], Any]:
    """A core, features [T·B + 1, F], a state, and where sequences start."""
    torch.manual_seed(3)
    core = Core("actor", kind, F, H).double()
    features = torch.randn(T * B + 1, F, dtype=torch.float64)
    state = {f"state/{path}": torch.randn(B, H, dtype=torch.float64) for path, _ in core.state}
    starts = np.zeros((T, B), bool)
    starts[0, 1] = starts[3, 0] = starts[4, 0] = starts[6, 2] = starts[2, 3] = True
    return core, features, state, starts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("burn_in", [0, 2, 4])
def test_all_sequences_at_once_are_cells_step_by_step(kind: str, burn_in: int) -> None:
    core, features, state, starts = made(kind)
    found, after = core(features, unroll(starts, state, burn_in=burn_in, final_step=[2], final_slot=[0]))
    cell, now = cell_of(core), tuple(state.values())
    for t in range(T):
        now = tuple(torch.where(torch.from_numpy(starts[t])[:, None], 0.0, one) for one in now)
        now = step(cell, features[t * B : (t + 1) * B], now)
        torch.testing.assert_close(found[t * B : (t + 1) * B], now[0], rtol=1e-12, atol=1e-13)
        if t == 2:
            last = step(cell, features[-1:], tuple(one[:1] for one in now))[0]
            torch.testing.assert_close(found[-1:], last, rtol=1e-12, atol=1e-13)
    for name, expected in zip(after, now, strict=True):
        torch.testing.assert_close(after[name], expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_gradients_of_the_processor(kind: str) -> None:
    gradients = []
    for device in ("cpu", "cuda"):
        core, features, state, starts = made(kind)
        core.eval().to(device)
        held = {path: one.to(device) for path, one in state.items()}
        found, _ = core(features.to(device), unroll(starts, held, burn_in=2, final_step=[2], final_slot=[0]))
        found.square().sum().backward()
        gradients.append(
            [parameter.grad.cpu() for parameter in core.parameters() if parameter.grad is not None]
        )
    assert len(gradients[0]) == 4
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_stop_at_the_burn_in_and_at_starts(kind: str) -> None:
    core, features, state, starts = made(kind)
    features.requires_grad_()
    found, _ = core(features, unroll(starts, state, burn_in=2))
    found[4 * B + 1].sum().backward()
    assert features.grad is not None
    felt = features.grad[: T * B].view(T, B, F).abs().sum(2) > 0
    assert felt[:, 1].tolist() == [False, False, True, True, True, False, False]
    assert not felt[:, [0, 2, 3]].any()
    features.grad.zero_()
    found, _ = core(features, unroll(starts, state, burn_in=2))
    found[5 * B].sum().backward()
    # An episode of column 0 began at row 4.
    assert (features.grad[: T * B].view(T, B, F).abs().sum(2) > 0)[:, 0].tolist() == [False] * 4 + [
        True,
        True,
        False,
    ]


def values_by_hand(policy: Policy, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """V of every observation [T+1, B] and of each last one, by cells."""
    core, body = policy.memory.critic_core, policy.critic_body
    assert core is not None
    assert body is not None
    assert batch.begins is not None
    cell = cell_of(core)
    state = tuple(batch.state[f"state/critic/{part}"].double() for part in ("h", "c"))
    values, states = [], []
    for t, rows in enumerate(batch.observation["observation"]):
        state = tuple(torch.where(batch.begins[t, :, None], 0.0, one) for one in state)
        state = step(cell, body(policy.read({"observation": rows})), state)
        states.append(state)
        values.append(policy.critic_head(state[0])[:, 0])
    finals = []
    for k, (t, b) in enumerate(zip(batch.final_step, batch.final_slot, strict=True)):
        rows = body(policy.read({"observation": batch.final_observation["observation"][k : k + 1]}))
        finals.append(
            policy.critic_head(step(cell, rows, tuple(one[b][None] for one in states[int(t)]))[0])[0, 0]
        )
    return torch.stack(values), finals


@torch.no_grad()
def test_values_of_a_batch_are_those_of_a_hand_unrolled_critic() -> None:
    policy = remembering(recurrent="lstm")
    actor = Actor(policy, longest=5)
    batch = batch_of([actor.fragment(8), actor.fragment(8)])
    policy.double()
    found = policy.outputs(see(policy, batch).inputs).value
    expected, finals = values_by_hand(policy, batch)
    assert len(finals) > 4
    torch.testing.assert_close(found[: expected.numel()].view_as(expected), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found[expected.numel() :], torch.stack(finals), rtol=1e-10, atol=1e-12)
    assert expected.std() > 0.01
