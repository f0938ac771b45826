from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.config.settings import ConfigurationError, PolicySection
from penstock.learner.algorithms.rows import see
from penstock.learner.batch import Batch
from penstock.learner.probe import Quarantine, make_probe
from penstock.policy import weights
from penstock.policy.networks import (
    BatchNorm,
    Dropout,
    ImageEncoder,
    ResidualBlock,
    dropouts,
    measure,
    moments,
    thinned,
)
from penstock.policy.policy import Policy, build
from penstock.policy.recurrent import Core, unroll
from penstock.protocol.spaces import Dict, Discrete, Space, Tuple
from tests.support.experience.experience import box, image, observations
from tests.support.experience.remembering import Actor, batch_of, remembering
from tests.unit.penstock.test_policy import MIXED

OWN = "tests.support.experience.own_networks"
EXAMPLE = "residual_network:ResidualNetwork"
PARTS = Dict((("where", box(3)), ("kind", Discrete(4)), ("pair", Tuple((box(2), Discrete(2))))))


def make(name: str, space: Space = PARTS, seed: int = 0, **section: Any) -> Policy:
    return build(space, Discrete(2), PolicySection(network=name, **section), seed)


@pytest.mark.parametrize("shared", [False, True])
def test_actor_and_critic_have_separate_networks_unless_shared(shared: bool) -> None:
    policy = make(f"{OWN}:Good", network_arguments={"scale": 2.0}, shared_trunk=shared)
    assert (policy.critic_body is None) == shared
    assert policy.actor_body.get_submodule("network").scale == 2.0
    seen = observations(PARTS, 7)
    acted = policy.act(seen)
    np.testing.assert_allclose(policy.log_prob(seen, acted.action), acted.log_prob, atol=2e-5)


def test_equal_seeds_give_equal_weights_and_leave_global_random_state() -> None:
    torch.manual_seed(3)
    undisturbed = torch.rand(1)
    torch.manual_seed(3)
    assert weights.encode(make(f"{OWN}:Good", seed=4)) == weights.encode(make(f"{OWN}:Good", seed=4))
    assert torch.rand(1) == undisturbed
    assert weights.encode(make(f"{OWN}:Good", seed=4)) != weights.encode(make(f"{OWN}:Good", seed=5))


def test_a_custom_network_is_published_and_probed_like_any_other() -> None:
    learner, replica, actor = (make(f"{OWN}:Good", seed=seed) for seed in (1, 2, 3))
    probe = make_probe(PARTS, replica, 0)
    quarantine = Quarantine(probe, replica, 1e-3)
    blob = weights.encode(learner)
    quarantine.expect(1, weights.sha256(blob), weights.snapshot(learner))
    weights.load_into(actor, blob)
    answer = actor.acting_log_prob(probe.observation, probe.action)
    np.testing.assert_allclose(answer, learner.log_prob(probe.observation, probe.action), atol=1e-5)


def test_the_reader_gives_the_place_of_each_part() -> None:
    policy = make("", MIXED)
    seen = {path: torch.from_numpy(array) for path, array in observations(MIXED, 5).items()}
    vector = policy.read(seen).vector
    columns = policy.reader.columns
    assert columns.keys() == {"observation/arm", "observation/code", "observation/bits"}
    torch.testing.assert_close(vector[:, columns["observation/arm"]], seen["observation/arm"])
    torch.testing.assert_close(vector[:, columns["observation/bits"]], seen["observation/bits"].float())
    assert vector[:, columns["observation/code"]].sum(1).eq(1).all()


def test_the_example_reads_vectors_and_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[3] / "examples" / "python")
    for space in (box(4), Dict((("camera", image(10, 10)), ("arm", box(2))))):
        policy = make(EXAMPLE, space, network_arguments={"blocks": 1, "dropout": 0.1})
        seen = observations(space, 6)
        acted = policy.act(seen)
        np.testing.assert_allclose(policy.log_prob(seen, acted.action), acted.log_prob, atol=2e-5)
        assert len(policy.dropouts) == 2


BROKEN = {
    "TooNarrow": r"forward gives torch.float32\(5, 11\) for 5 rows, must be torch.float32\(5, 12\)",
    "OneRow": r"forward gives torch.float32\(12,\) for 5 rows",
    "Double": r"forward gives torch.float64\(5, 12\)",
    "DoubleWeights": r"parameters \['extra torch.float64'\], must be torch.float32",
    "NotFinite": "hold NaN or infinity",
    "Raises": "forward raised RuntimeError: .*for 5 rows",
    "RaisesAtOnce": r"made with policy.network_arguments=\{\} it raised RuntimeError: no such file",
    "Numbers": "forward gives a list, must be a Tensor",
    "Writes": "writes to its inputs",
    "Remembers": "a second call gives other features",
    "LooksAround": "depend on other rows",
    "TorchDropout": "training mode gives other features; use Dropout and BatchNorm of penstock.policy",
    "TorchBatchNorm": "training mode gives other features",
    "Frozen": r"parameters \['layer.weight'\] take no gradient; make them buffers",
    "NoWidth": "width=None; say how many features it gives",
    "NoModule": "NoModule.*, must be a class of torch.nn.Module",
    "Huge": "its weights cannot be published: .*header",
    "NOTHING": "None, must be a class of torch.nn.Module",
    "make": "function make .*, must be a class",
    "Absent": "cannot be loaded: AttributeError",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_network_that_breaks_its_contract_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"policy.network='{OWN}:{name}': .*{BROKEN[name]}"):
        make(f"{OWN}:{name}")


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("Good", {}, "write module:Class"),
        ("no_such_module:Good", {}, "ModuleNotFoundError.*PYTHONPATH"),
        (f"{OWN}:Good", {"colour": 1}, r"network_arguments=\{'colour': 1\} it raised TypeError"),
    ],
)
def test_a_name_or_arguments_that_give_no_network_are_refused(
    name: str, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make(name, network_arguments=arguments)


CPU = torch.device("cpu")


def rows(count: int, width: int, seed: int = 0) -> Tensor:
    """Neither centred nor of one scale."""
    drawn = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    return drawn * (1.0 + torch.arange(width)) + 3.0


def test_what_was_merged_is_normalised_as_torch_does_in_evaluation_mode() -> None:
    layer, theirs, given = BatchNorm(3), nn.BatchNorm1d(3).eval(), rows(64, 3)
    torch.testing.assert_close(layer(given), given, atol=1e-4, rtol=1e-5)
    layer.merge(moments(given))
    theirs.running_mean = given.mean(0)
    theirs.running_var = given.var(0, correction=0)
    with torch.no_grad():
        for one in (layer, theirs):
            one.weight.fill_(2.0)
            one.bias.fill_(-1.0)
    torch.testing.assert_close(layer(given), theirs(given))


def test_the_statistics_are_a_mean_of_a_hundred_batches_and_then_a_moving_average() -> None:
    layer = BatchNorm(1)
    batches = [rows(20, 1, seed) + seed for seed in range(104)]
    for batch in batches:
        layer.merge(moments(batch))
    means = np.array([batch.double().mean() for batch in batches])
    variances = np.array([batch.double().var(correction=0) for batch in batches])
    share = np.array([0.01 * 0.99**4] * 100 + [0.01 * 0.99 ** (103 - index) for index in range(100, 104)])
    assert share.sum() == pytest.approx(1.0)
    assert layer.mean.item() == pytest.approx(share @ means)
    assert layer.variance.item() == pytest.approx(share @ variances)
    assert layer.merges.item() == 104


@pytest.mark.parametrize("training", [False, True])
def test_a_forward_pass_moves_no_statistics_in_either_mode(training: bool) -> None:
    layer = BatchNorm(3).train(training)
    layer.merge(moments(rows(50, 3)))
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    many = layer(rows(9, 3, 1))
    torch.testing.assert_close(layer(rows(9, 3, 1)[4:5]), many[4:5], rtol=0, atol=0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())


def test_layers_are_measured_with_the_inputs_they_will_get() -> None:
    net = nn.Sequential(nn.Linear(4, 5), BatchNorm(5), nn.Tanh(), nn.Linear(5, 3), BatchNorm(3))
    given = rows(200, 4)
    before = net(given)
    measured = measure(net, lambda: net(given))
    assert measured is not None
    assert torch.isfinite(measured.checksum())
    assert torch.equal(net(given), before)
    not_finite = measure(net, lambda: net(given.log()))
    assert not_finite is not None
    assert not torch.isfinite(not_finite.checksum())
    assert measure(nn.Linear(2, 2), lambda: pytest.fail("it ran")) is None
    measured.merge()
    for depth in (2, 5):
        answer = net[:depth](given)
        torch.testing.assert_close(answer.mean(0), torch.zeros(answer.shape[1]), atol=1e-5, rtol=0)
        torch.testing.assert_close(
            answer.var(0, correction=0), torch.ones(answer.shape[1]), atol=1e-3, rtol=0
        )


def test_equal_rows_set_no_scale() -> None:
    first = nn.Linear(8, 8)
    net = nn.Sequential(
        first, *(part for _ in range(3) for part in (BatchNorm(8), nn.Tanh(), nn.Linear(8, 8)))
    )
    alike = torch.full((200, 8), 0.5)
    for given in (alike, torch.cat([rows(1, 8) / 100, alike])):
        measured = measure(net, partial(net, given))
        assert measured is not None
        measured.merge()
    before = net(alike)
    with torch.no_grad():
        first.weight += 1e-3
    assert (net(alike) - before).abs().max() < 0.05


@pytest.mark.parametrize("training", [False, True])
def test_dropout_thins_by_its_seed_inside_thinned_alone(training: bool) -> None:
    layer, given = Dropout(0.25).train(training), torch.ones(1000, 40, requires_grad=True)
    assert layer(given) is given
    answers = []
    for seed in (5, 5, 6):
        with thinned(dropouts(nn.Sequential(layer)), seed, CPU):
            answers.append(layer(given))
    answer = answers[0]
    torch.testing.assert_close(answer.unique(), torch.tensor([0.0, 4 / 3]))
    assert (answer == 0).double().mean().item() == pytest.approx(0.25, abs=0.01)
    assert answer.mean().item() == pytest.approx(1.0, abs=0.01)
    assert torch.equal(answer, answers[1])
    assert not torch.equal(answer, answers[2])
    (gradient,) = torch.autograd.grad(answer.sum(), given)
    assert torch.equal(gradient, answer.detach())
    assert layer(given) is given


def test_two_dropouts_of_one_network_drop_independently() -> None:
    net = nn.Sequential(Dropout(0.5), Dropout(0.5))
    with thinned(dropouts(net), 1, CPU):
        answer = net(torch.ones(50, 8))
    assert (answer == 4.0).double().mean().item() == pytest.approx(0.25, abs=0.1)


SIZES = [
    ("auto", (84, 84, 4), 512, 3),
    ("auto", (36, 40), 512, 3),
    ("auto", (35, 84, 1), 512, 2),
    ("nature", (4, 84, 84), 512, 3),
    ("small", (84, 84, 3), 512, 2),
    ("small", (1, 1, 3), 512, 2),
    ("impala", (72, 96, 3), 256, 15),
    ("impala", (10, 10), 256, 15),
    ("impala", (3, 8, 8), 256, 15),
]


@pytest.mark.parametrize(("trunk", "shape", "width", "convolutions"), SIZES)
@torch.no_grad()
def test_every_trunk_accepts_every_layout(
    trunk: str, shape: tuple[int, ...], width: int, convolutions: int
) -> None:
    encoder = ImageEncoder("observation", image(*shape), trunk)
    seen = torch.randint(0, 256, (2, *shape), dtype=torch.uint8)
    features = encoder(seen)
    assert features.shape == (2, encoder.width) == (2, width)
    assert sum(isinstance(layer, nn.Conv2d) for layer in encoder.modules()) == convolutions
    if trunk == "impala" and shape[-1] == 3:
        channels_first = ImageEncoder("observation", image(3, *shape[:2]), trunk)
        channels_first.load_state_dict(encoder.state_dict())
        torch.testing.assert_close(channels_first(seen.permute(0, 3, 1, 2)), features)


def test_parameter_counts_match_the_papers() -> None:
    nature = ImageEncoder("observation", image(84, 84, 4), "nature")
    assert sum(p.numel() for p in nature.parameters()) == (
        (4 * 64 + 1) * 32 + (32 * 16 + 1) * 64 + (64 * 9 + 1) * 64 + (64 * 49 + 1) * 512
    )
    impala = ImageEncoder("observation", image(72, 96, 3), "impala")
    sections = [
        (before * 9 + 1) * after + 4 * (after * 9 + 1) * after
        for before, after in ((3, 16), (16, 32), (32, 32))
    ]
    assert sum(p.numel() for p in impala.parameters()) == sum(sections) + (32 * 9 * 12 + 1) * 256


def test_a_residual_block_starts_as_the_identity() -> None:
    policy = build(image(10, 10), Discrete(2), PolicySection(image_trunk="impala"), 0)
    blocks = [module for module in policy.modules() if isinstance(module, ResidualBlock)]
    assert len(blocks) == 12
    planes = torch.randn(2, blocks[0].first.in_channels, 5, 5)
    assert torch.equal(blocks[0](planes), planes)
    with torch.no_grad():
        nn.init.ones_(blocks[0].second.weight)
    assert not torch.equal(blocks[0](planes), planes)


@pytest.mark.parametrize(
    ("trunk", "size", "words"),
    [
        (
            "nature",
            35,
            r"'observation/camera'.*image_trunk='nature', which takes 36 .*use auto, small or impala",
        ),
        ("impala", 7, r"'observation/camera'.*image_trunk='impala', which takes 8 .*use auto or small"),
    ],
)
def test_an_image_too_small_for_its_trunk_is_refused_by_name(trunk: str, size: int, words: str) -> None:
    space = Dict((("arm", box(2)), ("camera", image(size, 84, 3))))
    with pytest.raises(ValueError, match=words):
        build(space, Discrete(2), PolicySection.model_validate({"image_trunk": trunk}), 0)


T, B, F, H = 7, 4, 3, 5
KINDS = ["lstm", "gru"]


def cell_of(core: Core) -> nn.LSTMCell | nn.GRUCell:
    kind = nn.LSTMCell if isinstance(core.rnn, nn.LSTM) else nn.GRUCell
    cell: Any = kind(core.rnn.input_size, core.size, dtype=torch.float64)
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        setattr(cell, name, getattr(core.rnn, f"{name}_l0"))
    return cell  # type: ignore[no-any-return]


def step(cell: Any, rows: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
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
def test_all_sequences_at_once_equal_cells_step_by_step(kind: str, burn_in: int) -> None:
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
def test_gpu_gradients_equal_cpu_gradients(kind: str) -> None:
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
def test_values_of_a_batch_equal_a_hand_unrolled_critic() -> None:
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
