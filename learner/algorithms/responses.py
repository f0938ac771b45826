"""Responses of a batch: rows of tokens, the sampled tokens flat, and micro-batches of them.

A column of a fragment is one response after its prompt, or a conversation, with tokens between its turns that
were not sampled. `valid` marks the sampled tokens; the episode ends once, at the last of them. The places of
tokens are kept on the CPU, so that a minibatch does not read the device. The last sections have the pure
functions of an update, and its preparation.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from penstock.config.algorithm_sections import TokenPPOSection
from penstock.learner.algorithms.losses import Advantages, carries, decoupled, gae
from penstock.learner.algorithms.rows import Steps
from penstock.learner.batch import Batch, send
from penstock.policy.tokens import TokenRows

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """rows: input of the policy.   index: int64 [m], the sampled tokens among n that its outputs are for."""

    rows: TokenRows
    index: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Responses:
    """R rows with n sampled tokens, ordered by row.

    tokens: int64 [R, L], prompt and response, all but the last.   action, behaviour, reward: [n].
    cut_short: bool [R], ended by the length limit.   step: int64 [n], place in its row.
    update: int64 [R], update count of the oldest weights of the row.
    counts: int64 [R], sampled tokens.   lengths: int64 [R], tokens of `tokens` up to the last sampled action.
    left_out: columns that hold no whole response.
    """

    tokens: Tensor
    action: Tensor
    behaviour: Tensor
    reward: Tensor
    cut_short: Tensor
    update: Tensor
    step: Index
    counts: Index
    lengths: Index
    left_out: int

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def sampled(self) -> int:
        return len(self.step)

    @property
    def last(self) -> Tensor:
        """Return the index of the last sampled token of each row, int64 [R]."""
        return send(torch.from_numpy(np.cumsum(self.counts) - 1), self.tokens.device)

    @property
    def turn_ends(self) -> Tensor:
        """Return which sampled tokens end a turn that another turn of their row follows, bool [n]."""
        ends = np.append(self.step[1:] != self.step[:-1] + 1, True)
        ends[np.cumsum(self.counts) - 1] = False
        return send(torch.from_numpy(ends), self.tokens.device)

    def sampled_by(self, update: int) -> Tensor:
        """Return which sampled tokens are of rows that only the weights of `update` made, bool [n]."""
        counts = send(torch.from_numpy(self.counts), self.tokens.device)
        return (self.update == update).repeat_interleave(counts, output_size=self.sampled)

    def prompts(self) -> Tensor:
        """Return a number for each row, equal for equal prompts, int64 [R]."""
        first = self.step[np.cumsum(self.counts) - self.counts]
        ends = send(torch.from_numpy(first), self.tokens.device)
        places = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        prompts = self.tokens.masked_fill(places > ends.unsqueeze(1), -1)
        numbers: Tensor = torch.unique(prompts, dim=0, return_inverse=True)[1]
        return numbers

    def micro_batches(self, rows: Index, most_places: int) -> Iterator[MicroBatch]:
        """Yield rows by length in parts of at most `most_places` tokens; a longer row is a part alone."""
        for part in _parts(rows[np.argsort(self.lengths[rows], kind="stable")], self.lengths, most_places):
            yield self._micro_batch(part)

    def behind(self, rows: Index, most_places: int) -> Iterator[MicroBatch]:
        """Yield rows with their last sampled token, for the output after it; `index`: of the R rows."""
        for part in _parts(
            rows[np.argsort(self.lengths[rows], kind="stable")], self.lengths + 1, most_places
        ):
            longest, device = int(self.lengths[part].max()) + 1, self.tokens.device
            ends, on_device = (send(torch.from_numpy(one), device) for one in (self.lengths[part], part))
            tokens = functional.pad(self.tokens.index_select(0, on_device), (0, 1))[:, :longest]
            tokens[torch.arange(len(part), device=device), ends] = self.action[self.last[on_device]]
            places = torch.arange(longest, device=device)
            yield MicroBatch(
                TokenRows(
                    tokens=tokens,
                    present=places <= ends[:, None],
                    place=torch.arange(len(part), device=device) * longest + ends,
                    action=torch.zeros_like(on_device),
                ),
                on_device,
            )

    def _micro_batch(self, rows: Index) -> MicroBatch:
        counts, lengths, longest = self.counts[rows], self.lengths[rows], int(self.lengths[rows].max())
        first = np.cumsum(self.counts) - self.counts
        index = np.repeat(first[rows] - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        place = np.repeat(np.arange(len(rows)) * longest, counts) + self.step[index]
        present = np.arange(longest) < lengths[:, None]
        device = self.tokens.device
        on_device = send(torch.from_numpy(index), device)
        return MicroBatch(
            TokenRows(
                tokens=self.tokens.index_select(0, send(torch.from_numpy(rows), device))[:, :longest],
                present=send(torch.from_numpy(present), device),
                place=send(torch.from_numpy(place), device),
                action=self.action.index_select(0, on_device),
            ),
            on_device,
        )


class Grid:
    """Converts sampled tokens [n] to [S, R], token s of response r without those between, and back."""

    def __init__(self, responses: Responses) -> None:
        counts, device = responses.counts, responses.tokens.device
        row = np.repeat(np.arange(len(counts)), counts)
        nth = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        place = nth * len(counts) + row
        self._place = send(torch.from_numpy(place), device)
        self._shape = (int(counts.max()), len(counts))
        rows = np.arange(self._shape[0])[:, None]
        self.sampled = send(torch.from_numpy(rows < counts), device)
        """Bool [S, R]."""

    def spread(self, flat: Tensor) -> Tensor:
        """[n] → [S, R], 0 elsewhere."""
        room = flat.new_zeros(self._shape[0] * self._shape[1])
        return room.index_copy(0, self._place, flat).view(self._shape)

    def gather(self, grid: Tensor) -> Tensor:
        return grid.flatten().index_select(0, self._place)


def read_responses(batch: Batch) -> Responses | None:
    """Return the whole responses of a batch, or None where there is none. Reads the device once."""
    ended = batch.terminated | batch.truncated
    host = torch.stack([batch.valid, ended, batch.truncated & ~batch.terminated]).cpu().numpy()
    valid, ends, cut_short = host.transpose(0, 2, 1)
    kept, last = _whole(valid, ends)
    if not len(kept):
        return None
    row, step = valid[kept].nonzero()
    device = batch.valid.device
    columns = send(torch.from_numpy(kept), device)
    place = send(torch.from_numpy(step * valid.shape[0] + kept[row]), device)
    return Responses(
        tokens=batch.observation["observation"][:-1].t().index_select(0, columns).long(),
        action=batch.action["action"].flatten().index_select(0, place).long(),
        behaviour=batch.log_prob.flatten().index_select(0, place),
        reward=batch.reward.flatten().index_select(0, place),
        cut_short=send(torch.from_numpy(cut_short[kept, last[kept]]), device),
        update=batch.update.to(device).index_select(0, columns),
        step=step,
        counts=np.bincount(row, minlength=len(kept)),
        lengths=last[kept] + 1,
        left_out=int(valid.any(1).sum()) - len(kept),
    )


def _whole(valid: NDArray[np.bool_], ends: NDArray[np.bool_]) -> tuple[Index, Index]:
    """Return the columns [B, T] with one end, at the last sampled token, and its place, [B]."""
    last = valid.shape[1] - 1 - np.argmax(valid[:, ::-1], 1)
    at_last = np.take_along_axis(ends, last[:, None], 1)[:, 0]
    return (valid.any(1) & at_last & (ends.sum(1) == 1)).nonzero()[0], last


def _parts(order: Index, lengths: Index, most_places: int) -> Iterator[Index]:
    """Yield consecutive parts of `order`, by rising length, whose padded size is within the limit."""
    start = 0
    for end in range(1, len(order) + 1):
        is_last = end == len(order)
        if is_last or (end + 1 - start) * lengths[order[end]] > most_places:
            yield order[start:end]
            start = end


# ---- Rewards and advantages of sampled tokens; pure functions.

DEVIATION_FLOOR = 1e-4
"""Least deviation to divide by, in the unit of the score: smaller differences are noise."""


def scored(reward: Tensor, cut: Tensor, *, eos_penalty: float) -> Tensor:
    """Return r_t − penalty · 1[the length limit ended a response at t]; all [n]."""
    return reward - eos_penalty * cut.to(reward.dtype)


def divergence_reward(log_ratio: Tensor, *, coefficient: float, bound: float) -> Tensor:
    """Return −β clip(log π/π_ref, ±bound), [n].

    The estimator of KL(π‖π_ref) is a reward, without gradient (Ziegler et al. 2019, eq. 2): its policy
    gradient is that of the divergence itself.
    """
    return -coefficient * log_ratio.clamp(-bound, bound)


def turn_discounts(turn_end: Tensor, *, discount: float, turn_discount: float) -> Tensor:
    """Return γ of each token, γ γ_turn of the last of a turn that another follows; bool → float [S, R]."""
    within = torch.full(turn_end.shape, discount, device=turn_end.device)
    return within.masked_fill(turn_end, discount * turn_discount)


def token_gae(
    reward: Tensor,
    value: Tensor,
    sampled: Tensor,
    *,
    discount: float | Tensor,
    gae_lambda: float,
    value_lambda: float,
    beyond: Tensor | None = None,
) -> Advantages:
    """Estimate by GAE(λ) for the policy and GAE(λ_V) for the critic (Yuan et al. 2025); [S, R] each.

    δ_t = r_t + γ V_{t+1} − V_t, V = `beyond` after the last token;
    A_t = Σ (γλ)^k δ_{t+k};  target = V_t + Σ (γλ_V)^k δ_{t+k}.

    discount: γ, one number or one per token, [S, R], as `turn_discounts` says. beyond: [R], 0 where a row
    ended; None: all of them did.
    """
    following = torch.zeros_like(value)
    following[:-1] = value[1:]
    carried = _carried(sampled)
    following = following.masked_fill(~carried, 0.0)
    if beyond is not None:
        following = torch.where(sampled & ~carried, beyond, following)
    unroll = (reward, value, following, carried, sampled)
    for_policy = gae(*unroll, discount=discount, gae_lambda=gae_lambda)
    if value_lambda == gae_lambda:
        return for_policy
    return Advantages(for_policy.advantage, gae(*unroll, discount=discount, gae_lambda=value_lambda).target)


def returns(reward: Tensor, sampled: Tensor, *, discount: float) -> Tensor:
    """Return Σ γ^k r_{t+k} to the end of the response, [S, R]."""
    nothing = torch.zeros_like(reward)
    return gae(
        reward, nothing, nothing, _carried(sampled), sampled, discount=discount, gae_lambda=1.0
    ).advantage


def leave_one_out(reward: Tensor, sampled: Tensor, *, discount: float) -> Tensor:
    """Return the advantages of REINFORCE with a leave-one-out baseline (Kool et al. 2019), [S, R].

    The baseline is the mean return of the other responses of the batch, 0 where there are none.
    """
    ahead = returns(reward, sampled, discount=discount)
    return (ahead - _of_others(ahead[0])).masked_fill(~sampled, 0.0)


def group_relative(
    score: Tensor,
    divergence: Tensor,
    sampled: Tensor,
    group: Tensor,
    *,
    discount: float,
    by_deviation: bool,
) -> Tensor:
    """Return (G − mean)/deviation of the scores G of a group plus each token's divergence, [S, R].

    Shao et al. 2024: the score alone is normalised (section 4.1.2), and all tokens of a response share it.
    The divergence is a term of each token (eq. 4): nothing divides it, so that a group of equal scores moves
    the policy by β alone. Its mean over the batch is taken away, which changes no expected gradient.

    score, divergence: [S, R], of `scored` and of `divergence_reward`.
    group: int64 [R], numbers of the prompts.   by_deviation: False: G − mean (Liu et al. 2025).
    A response without another to its prompt is compared with the rest of the batch, since the mean of its own
    group would cancel it.
    """
    total = returns(score, sampled, discount=discount)[0]
    sums = total.new_zeros(len(group)).index_add(0, group, total)
    sizes = total.new_zeros(len(group)).index_add(0, group, torch.ones_like(total))
    alone = (sizes == 1)[group]
    difference = total - torch.where(alone, _of_others(total), (sums / sizes)[group])
    if by_deviation:
        squares = total.new_zeros(len(group)).index_add(0, group, difference.square())
        of_group = (squares / sizes).sqrt()[group]
        # A batch of one has no deviation to divide by.
        of_batch = total.std(correction=0) if len(total) > 1 else torch.ones_like(total)
        difference = difference / torch.where(alone, of_batch, of_group).clamp(min=DEVIATION_FLOOR)
    charged = divergence - divergence[sampled].mean()
    return (difference + charged).masked_fill(~sampled, 0.0)


def whitened(advantage: Tensor, responses: int) -> Tensor:
    """Standardise over the tokens [n] of two responses or more; one alone is not changed."""
    if responses < 2:
        return advantage
    centred = advantage - advantage.mean()
    return centred / centred.std(correction=0).clamp(min=DEVIATION_FLOOR)


def _carried(sampled: Tensor) -> Tensor:
    nowhere = torch.zeros_like(sampled)
    return carries(nowhere, nowhere, sampled)


def _of_others(total: Tensor) -> Tensor:
    """Return the mean of all others for each, [R]; 0 where there are none."""
    if len(total) == 1:
        return torch.zeros_like(total)
    return (total.sum() - total) / (len(total) - 1)


# ---- The preparation of a batch of responses, before its epochs.


@dataclass(frozen=True, slots=True)
class Prepared(Steps):
    """The n sampled tokens. entropy, kl_reference: scalars, in nats; the latter per response, or None."""

    entropy: Tensor
    kl_reference: Tensor | None


def prepare(
    responses: Responses,
    read: Tensor,
    section: TokenPPOSection,
    kl_coefficient: float,
    beyond: Tensor | None = None,
) -> Prepared:
    """Return the input of the epochs of an update.

    read: log π_prox, entropy, V, [3, n], or with log π_ref, [4, n], if its coefficient is not 0.
    beyond: [R], the value of the state after each row; None: all rows ended.
    """
    (proximal, entropy, value), reference = read[:3], read[3:]
    log_ratio = proximal - (reference[0] if len(reference) else proximal)
    grid = Grid(responses)
    ends = responses.cut_short.to(read.dtype)
    cut = torch.zeros_like(proximal).index_copy(0, responses.last, ends)
    score = scored(responses.reward, cut, eos_penalty=section.eos_penalty)
    charge = divergence_reward(log_ratio, coefficient=kl_coefficient, bound=section.log_ratio_bound)
    spread = (grid.spread(score), grid.spread(charge), grid.spread(value))
    estimated = _advantages(responses, grid, section, *spread, beyond)
    advantage, target = grid.gather(estimated.advantage), grid.gather(estimated.target)
    if section.normalise_advantages and section.advantage != "group":
        advantage = whitened(advantage, len(responses))
    surrogate = decoupled(responses.behaviour, proximal, advantage, section.behaviour_weight_cap)
    fixed = (surrogate.anchor, surrogate.weighted_advantage, target, value, responses.behaviour, proximal)
    kl_reference = log_ratio.sum() / len(responses) if len(reference) else None
    return Prepared(torch.stack(fixed), entropy.mean(), kl_reference)


def _advantages(
    responses: Responses,
    grid: Grid,
    section: TokenPPOSection,
    score: Tensor,
    divergence: Tensor,
    value: Tensor,
    beyond: Tensor | None,
) -> Advantages:
    """Estimate advantages and targets, [S, R]; without a critic the targets are its values."""
    discount, reward = section.discount, score + divergence
    match section.advantage:
        case "gae":
            ends, between = grid.spread(responses.turn_ends), section.turn_discount
            return token_gae(
                reward,
                value,
                grid.sampled,
                discount=(
                    discount
                    if between == 1.0
                    else turn_discounts(ends, discount=discount, turn_discount=between)
                ),
                gae_lambda=section.gae_lambda,
                value_lambda=section.value_lambda,
                beyond=beyond,
            )
        case "group":
            advantage = group_relative(
                score,
                divergence,
                grid.sampled,
                responses.prompts(),
                discount=discount,
                by_deviation=section.normalise_advantages,
            )
        case "reinforce":
            advantage = leave_one_out(reward, grid.sampled, discount=discount)
    return Advantages(advantage, value)
