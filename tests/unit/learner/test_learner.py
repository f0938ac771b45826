import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.broker.log.replies import Answer, Command, Status, Totals
from penstock.config import settings as configuration
from penstock.config.settings import (
    ConfigurationError,
    EnvironmentSection,
    OnPolicySection,
    PolicySection,
    Settings,
)
from penstock.learner.algorithms.algorithm import Update
from penstock.learner.algorithms.registry import ALGORITHMS, check_hardware
from penstock.learner.batch import assemble
from penstock.learner.commands import CommandRecord
from penstock.learner.failures import MOST_KEPT, cause, keep_evidence
from penstock.learner.feed.log_feed import LogBatch
from penstock.learner.lease import holder_of
from penstock.learner.ledger import Drop, Ledger, Origin, append_lineage, check_same, ranges, sections
from penstock.learner.model import check_memory, check_schema, check_specification, fitted, make_model
from penstock.protocol.fragment import Slot, WeightSpan
from penstock.protocol.limits import MIB
from penstock.protocol.schema import Axes, fragment_schema
from penstock.protocol.spaces import Box, Dict, Discrete
from penstock.workloads.control.environment import spaces
from tests.support.experience.experience import Collector, Fragment, cartpoles, small_policy
from tests.support.experience.remembering import Actor, batch_of, remembering
from tests.support.run import small_run

CPU = torch.device("cpu")


def loaded(**sections: Any) -> Settings:
    return configuration.load([{"run": "a"}, sections])


def good() -> Fragment:
    """With a truncated step."""
    return Collector(cartpoles(2, max_episode_steps=4)).fragment(small_policy(), 6)


def test_ragged_fragments_are_padded_and_final_rows_point_at_their_columns() -> None:
    policy, shapes = small_policy(), ((5, 2), (12, 1), (9, 3))
    # The poles fall within ten steps or so.
    parts = [
        Collector(cartpoles(count, max_episode_steps=8), session).fragment(policy, steps, update=10 + session)
        for session, (steps, count) in enumerate(shapes)
    ]
    batch = assemble(parts, CPU)
    assert batch.valid.shape == (12, 6)
    assert batch.observation["observation"].shape == (13, 6, 4)
    start = 0
    for header, arrays in parts:
        columns = slice(start, start + len(header.slots))
        start = columns.stop
        for name in ("reward", "terminated", "truncated", "valid", "log_prob"):
            found = getattr(batch, name)[:, columns].numpy()
            np.testing.assert_array_equal(found[: header.steps], arrays[name])
            assert not found[header.steps :].any()
        whole = batch.observation["observation"][: header.steps + 1, columns]
        np.testing.assert_array_equal(whole, arrays["observation"])
    assert batch.update.tolist() == [10, 10, 11, 12, 12, 12]
    assert batch.slots == ((0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2))
    ended = batch.terminated | batch.truncated
    assert len(batch.final_slot) == int(ended.sum()) > 0
    assert ended[batch.final_step, batch.final_slot].all()
    expected = np.concatenate([arrays["final/observation"] for _, arrays in parts])
    np.testing.assert_array_equal(batch.final_observation["observation"], expected)


def test_invalid_steps_count_for_nothing() -> None:
    header, arrays = good()
    valid = arrays["valid"].copy()
    valid[2] = False
    batch = assemble([(header, arrays | {"valid": valid, "truncated": np.logical_not(valid)})], CPU)
    assert not any(part[2].any() for part in (batch.reward, batch.log_prob, batch.truncated))


def test_staleness_counts_the_oldest_weights_and_slots_name_session_and_environment() -> None:
    header, arrays = good()
    spans = (WeightSpan(0, 0, 3, 7, 7), WeightSpan(0, 3, 3, 9, 8))
    batch = assemble([(replace(header, weights=spans, slots=(Slot(4, 0, 0), Slot(2, 0, 0))), arrays)], CPU)
    assert batch.update.tolist() == [7, 7]
    assert batch.slots == ((1, 4), (1, 2))
    with pytest.raises(ValueError, match="no fragments"):
        assemble([], CPU)


def test_masks_and_states_are_in_the_right_columns() -> None:
    actor = Actor(remembering(recurrent="lstm"), masked=True)
    first, second = actor.fragment(6), actor.fragment(2)
    batch = batch_of([first, second])
    for columns, fragment in ((slice(0, 3), first), (slice(3, 6), second)):
        arrays, steps = fragment.arrays(), fragment.header.steps
        assert batch.begins is not None
        np.testing.assert_array_equal(batch.begins[: steps + 1, columns], arrays["begins"])
        np.testing.assert_array_equal(
            batch.observation["mask/action"][: steps + 1, columns], arrays["mask/action"]
        )
        for name, state in batch.state.items():
            np.testing.assert_array_equal(state[columns], arrays[name])
    assert batch.begins is not None
    assert not batch.begins[3:, 3:].any()


def command(number: int, answer: Answer | None = None) -> Command:
    request_id = f"id-{number}"
    return Command(number=number, request_id=request_id, action="restore", argument="good", answer=answer)


def done(number: int) -> Answer:
    return Answer(number=number, request_id=f"id-{number}", detail="done")


def test_an_executed_command_is_not_executed_again() -> None:
    record = CommandRecord()
    assert record.is_wanted(command(1))
    record.note_done(done(1))
    assert not record.is_wanted(command(1))
    (answer,) = record.uncommitted("c1")
    assert answer == replace(done(1), checkpoint_id="c1")
    state = record.state()
    record.committed("c1")
    assert record.uncommitted("c2") == ()
    for known in (record, CommandRecord.from_state(state, "c1")):
        assert not known.is_wanted(command(1))
        assert known.newest == 1


def test_a_command_in_a_lost_checkpoint_is_executed_again() -> None:
    record = CommandRecord.from_state({"newest": 1, "answers": []}, "c1")
    assert record.is_wanted(command(2, done(2)))
    assert not record.is_wanted(command(1, done(1)))
    assert not record.is_wanted(command(2, replace(done(2), refusal=1))), "what was refused was not done"


def test_an_answer_lost_by_redis_is_sent_again_with_the_current_number() -> None:
    record = CommandRecord()
    record.note_done(done(1))
    assert record.known(command(1)) is None
    record.committed("c1")
    again = replace(command(7), request_id="id-1")
    assert record.known(again) == replace(done(1), number=7, checkpoint_id="c1")
    assert not record.is_wanted(again)
    assert record.known(command(1, done(1))) is None, "Redis has the answer"


def test_the_number_of_answers_is_limited() -> None:
    record = CommandRecord()
    for number in range(1, 40):
        record.note_done(done(number))
        record.committed(f"c{number}")
    assert len(record.state()["answers"]) == 16
    assert record.newest == 39


def _log_batch(last: int) -> LogBatch:
    return LogBatch(
        last=last,
        trained=(last,),
        dropped={},
        steps=1,
        updates=(1,),
        versions=(1,),
        batch=None,
        round=None,
        size=1,
        created_us=0,
        assemble_s=0.0,
        origins={},
    )


@pytest.mark.promise("session-whose-batches-fail")
def test_a_session_that_fails_repeatedly_does_not_fill_the_disk(tmp_path: Path) -> None:
    failed = Update(applied=False, reason="nan", steps=0, gradient_steps=0, metrics={})
    kept = [keep_evidence(tmp_path, _log_batch(last), failed, 7) for last in range(1, MOST_KEPT + 6)]
    assert sorted(str(path.with_suffix("")) for path in tmp_path.iterdir()) == sorted(kept[-MOST_KEPT:])


def test_a_run_without_any_actor_does_not_say_that_actors_are_gone() -> None:
    assert "no rollout worker has come" in cause(Status(), {}, 300)
    assert "all actors are gone" in cause(Status(log_head=1), {}, 300)


@pytest.mark.promise("learners-two-folders-two")
def test_learners_of_two_folders_at_one_path_have_two_names(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    first = holder_of(folder)
    assert holder_of(folder) == first, "a learner that is started again keeps its name"
    folder.rename(tmp_path / "another place")
    folder.mkdir()
    assert holder_of(folder) != first


def test_trained_and_dropped_add_up_to_the_position() -> None:
    ledger = Ledger()
    ledger.book(3, trained=(1, 3), dropped={2: Drop.STALE}, steps=24)
    ledger.book(5, trained=(), dropped={4: Drop.NAN, 5: Drop.STALE}, steps=16)
    assert ledger.totals() == Totals(trained=2, dropped={"stale": 2, "nan": 1}, env_steps=40)
    assert ledger.position == 5


@pytest.mark.parametrize(
    ("trained", "dropped"),
    [((1, 3), {}), ((1, 2, 3), {3: Drop.NAN}), ((1, 1, 2), {}), ((2, 3, 4), {}), ((), {})],
)
def test_a_number_that_is_missing_doubled_or_foreign_is_an_error(
    trained: tuple[int, ...], dropped: dict[int, Drop]
) -> None:
    with pytest.raises(RuntimeError, match=r"entries 1\.\.3"):
        Ledger().book(3, trained=trained, dropped=dropped, steps=0)


def test_books_balance_only_when_three_counts_agree() -> None:
    ledger = Ledger(10, Totals(trained=9, dropped={"stale": 1}))
    assert ledger.balance(acked=15, lost=2, resident=3).balanced
    assert ledger.balance(acked=15, lost=2, resident=3).dropped == {"stale": 1, "log_lost": 2}
    assert not ledger.balance(acked=15, lost=2, resident=4).balanced


def test_each_checkpoint_adds_its_own_range_to_the_lineage_behind_a_torn_line_too(tmp_path: Path) -> None:
    ledger, path = Ledger(), tmp_path / "lineage.jsonl"
    path.write_text('{"checkpoint": "torn by a cra')
    ledger.book(4, trained=(1, 4), dropped={2: Drop.STALE, 3: Drop.STALE}, steps=8)
    append_lineage(path, ledger.entry("one", ""))
    ledger.book(6, trained=(5, 6), dropped={}, steps=8)
    append_lineage(path, ledger.entry("two", "one"))
    first, second = map(json.loads, path.read_text().splitlines()[1:])
    assert (first["first"], first["last"], first["exceptions"]) == (1, 4, {"stale": [[2, 3]]})
    assert (second["parent"], second["first"], second["last"]) == ("one", 5, 6)
    assert second["exceptions"] == {}


@given(st.sets(st.integers(1, 60)))
def test_ranges_hold_exactly_the_given_numbers(numbers: set[int]) -> None:
    found = ranges(list(numbers))
    assert {n for first, last in found for n in range(first, last + 1)} == numbers
    assert all(after[0] > before[1] + 1 for before, after in itertools.pairwise(found))


def test_a_line_names_the_senders_of_trained_and_omitted_fragments(tmp_path: Path) -> None:
    ledger, origins = Ledger(), {1: Origin(7, 1, b"11111111"), 2: Origin(8, 1, b"22222222")}
    origins |= {3: Origin(7, 2, b"33333333"), 4: Origin(7, 3)}
    dropped = {4: Drop.STALE, 5: Drop.LOG_LOST}
    ledger.book(5, trained=(3, 1, 2), dropped=dropped, steps=24, origins=origins)
    append_lineage(tmp_path / "lineage.jsonl", ledger.entry("one", "", version=4))
    line = json.loads((tmp_path / "lineage.jsonl").read_text())
    assert line["sessions"] == {"7": [[1, 2]], "8": [[1, 1]]}
    assert line["left_out"] == {"stale": {"7": [[3, 3]]}}
    assert line["digests"]["7"] == (b"11111111" + b"33333333").hex()
    assert line["version"] == 4
    assert ledger.entry("two", "one").sessions == {}


def test_a_run_from_before_a_setting_existed_is_resumed_with_its_default() -> None:
    now = sections(loaded())
    older = {name: json.loads(now[name]) for name in ("policy", "environment")}
    del older["policy"]["image_axes"], older["environment"]["mask_key"]
    before = now | {name: json.dumps(content) for name, content in older.items()}
    check_same("r", before, now)
    for section, key, value in (
        ("policy", "image_axes", "channels_last"),
        ("policy", "hidden_sizes", [7]),
        ("environment", "mask_key", "m"),
        ("environment", "kwargs", {"b": [7]}),
    ):
        with pytest.raises(
            ConfigurationError, match=rf"^{section}\.{key}.*begun with .*with the same"
        ) as said:
            check_same("r", before, sections(loaded(**{section: {key: value}})))
        assert "7" not in f"{value}" or "7" in str(said.value)
        assert len(str(said.value)) < 200
    with pytest.raises(ConfigurationError, match="^policy.a_setting_that_was="):
        check_same("r", before | {"policy": '{"a_setting_that_was": 1}'}, now)


def test_a_fragment_larger_than_a_message_is_made_shorter() -> None:
    made = loaded(environment={"count": 4096}, actor={"unroll_length": 4096})
    schema = fragment_schema(*spaces(made.environment))
    length = fitted(made, schema).actor.unroll_length
    assert 1 < length < 4096
    assert schema.most_ends(length, 4096) >= 4096 > schema.most_ends(length + 1, 4096)
    assert fitted(fitted(made, schema), schema) == fitted(made, schema)
    with pytest.raises(ConfigurationError, match=r"of 1 steps .* holds \d+; lower environment.count"):
        fitted(made, fragment_schema(Box(np.zeros(10**6), np.ones(10**6)), Discrete(2)))


def test_actors_shape_rewards_with_the_learners_discount() -> None:
    wrappers = [{"shape": "math:fabs"}, {"shape": "math:fabs", "discount": 0.5}, {"scale": 2.0}]
    made = loaded(environment={"reward": wrappers}, algorithm={"discount": 0.875})
    told = EnvironmentSection.model_validate_json(make_model(made).specification.environment_json)
    assert [one.discount for one in told.reward] == [0.875, 0.5, None]


class Grid(gymnasium.Env[Any, Any]):
    observation_space = gymnasium.spaces.Box(0, 255, (10, 10, 4), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "arguments of no policy": (
        {"policy": {"kwargs": {"model": "base"}}},
        r"policy\.kwargs=\{'model': 'base'\}: .*takes none",
    ),
    "an algorithm of tokens": (
        {"algorithm": {"name": "token_ppo"}},
        r"algorithm\.name='token_ppo': does not .*acts step by step; use clone or",
    ),
    "no such shape of rewards": (
        {"environment": {"reward": [{"shape": "math:potential"}]}},
        r"environment\.reward: shape='math:potential' cannot be loaded",
    ),
    "burn-in of nothing": (
        {"policy": {"burn_in": 4}},
        r"policy\.burn_in=4: policy\.recurrent='none' has no state to refresh",
    ),
    "burn-in of everything": (
        {"policy": {"burn_in": 32, "recurrent": "lstm"}},
        r"policy\.burn_in=32: nothing is left to learn from of actor\.unroll_length=32",
    ),
    "masks of real numbers": (
        {"environment": {"id": "Pendulum-v1", "mask_key": "action_mask"}},
        r"environment\.mask_key='action_mask': the actions Box.* no choices of one of n",
    ),
    "stacked out of shape": (
        {"environment": {"id": "Grid-v7"}, "policy": {"frame_stack": 4}},
        r"environment\.id='Grid-v7': policy\.frame_stack=4: .*stack fewer frames",
    ),
    "a buffer below a fragment": (
        {"algorithm": {"name": "dqn", "error_steps": 100}},
        r"error_steps=100: with fragments of 256 steps.*give at least 256",
    ),
    "replay that is full too early": (
        {"algorithm": {"name": "dqn", "capacity": 1100}},
        r"capacity=1100: .*give at least 1256",
    ),
    "replay of less than a fragment": (
        {"algorithm": {"name": "dqn", "capacity_bytes": 1000}},
        r"capacity_bytes=1000: a fragment alone has \d+",
    ),
}


@pytest.mark.parametrize(("layer", "message"), REFUSED.values(), ids=REFUSED)
def test_unlearnable_settings_are_refused_at_the_start(layer: dict[str, Any], message: str) -> None:
    if "Grid-v7" not in gymnasium.registry:
        gymnasium.register("Grid-v7", lambda **_: Grid())
    with pytest.raises(ConfigurationError, match=message):
        make_model(loaded(**layer))


def test_a_specification_larger_than_a_reply_is_refused() -> None:
    pixels = np.zeros((1024, 1024), np.float32)
    large = replace(small_run.specification(), observation_space=Box(pixels, pixels + 1))
    with pytest.raises(ConfigurationError, match=r"specification has 8\d+ bytes.*smaller"):
        check_specification(large)


def test_an_observation_of_more_parts_than_a_fragment_has_tensors_is_refused() -> None:
    space = Dict(tuple((f"part-{index}", Discrete(2)) for index in range(30)))
    with pytest.raises(ConfigurationError, match="68 tensors.*at most 64"):
        check_schema(fragment_schema(space, Discrete(2)))


@pytest.mark.promise("learner-reads-once-bounded")
def test_weights_that_do_not_fit_below_maxmemory_are_refused_with_the_figures() -> None:
    made = loaded(broker={"max_log_bytes": 100 * MIB, "max_staged_bytes": MIB})
    needed = (100 + 1 + (3 + 4 + 2 + 16 + 1) * 10 + 16 + 64) * MIB
    check_memory(made, 10 * MIB, needed)
    check_memory(made, 10 * MIB, 0)
    with pytest.raises(ConfigurationError, match=f"maxmemory={needed - 1}.*need {needed}"):
        check_memory(made, 10 * MIB, needed - 1)


@pytest.mark.parametrize("key", ["environment.count", "evaluation.episodes"])
def test_more_environments_or_episodes_than_a_message_may_name_are_refused(key: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{key}=4097.*4096"):
        configuration.load([configuration.parse_assignment(f"{key}=4097")])


@pytest.mark.parametrize("name", ["ppo", "impala", "reinforce"])
@pytest.mark.parametrize("staleness", [0, 3])
def test_the_specification_holds_the_pacing_of_the_algorithm(name: str, staleness: int) -> None:
    section = {"name": name, "staleness": staleness, "batch_steps": 512}
    model = make_model(loaded(algorithm=section))
    told = model.specification
    assert (told.lock_step, told.update_steps, told.stale_after) == (
        staleness == 0, 512, 4 * (staleness + 1)
    )  # fmt: skip
    expected: Any = ALGORITHMS[name]
    assert type(model.algorithm) is expected
    assert model.pacing.budget == 512 * (staleness + 1)


def test_the_folder_of_journals_is_sent_to_no_actor(tmp_path: Path) -> None:
    made = loaded(environment={"id": "CartPole-v1"}, actor={"ack_journal": str(tmp_path)})
    specification = make_model(made).specification
    assert str(tmp_path) not in specification.actor_json
    assert str(tmp_path).encode() not in specification.encode()


def replaying(**algorithm: object) -> Settings:
    return loaded(environment={"id": "CartPole-v1"}, algorithm={"name": "dqn", **algorithm})


@pytest.mark.promise("fragments-kept-replay-trimmed")
def test_a_log_smaller_than_replay_is_refused_with_the_figures() -> None:
    make_model(replaying())
    with pytest.raises(
        ConfigurationError, match=r"max_log_bytes=536870912.*replay \d+ bytes.*: \d+ bytes and"
    ):
        make_model(replaying(capacity_bytes=512 * MIB))
    with pytest.raises(
        ConfigurationError, match=r"max_log_entries=1000000.*in at most 1000000.*10000\d\d entries"
    ):
        make_model(replaying(capacity=1_000_000))


def test_the_room_of_the_log_is_counted_without_replay() -> None:
    one, other = (make_model(replaying(capacity_bytes=size * MIB)).room for size in (100, 150))
    assert 50 * MIB <= one.size - other.size <= 67 * MIB


def test_actors_get_the_policy_that_the_algorithm_needs() -> None:
    made = make_model(replaying())
    told = PolicySection.model_validate_json(made.specification.policy_json)
    assert (told.discrete, told.shared_trunk) == ("epsilon_greedy", True)
    assert made.specification.stale_after == made.specification.update_steps == 0


def test_a_fragment_carries_recurrent_state_and_masks() -> None:
    task = {"id": "Menu-v0", "mask_key": "action_mask"}
    policy = {"recurrent": "gru", "recurrent_size": 8, "shared_trunk": True, "frame_stack": 2}
    rules = make_model(loaded(environment=task, policy=policy)).specification
    assert {rule.name: (rule.shape, rule.axes) for rule in rules.schema.under("state")} == {
        "state/actor/h": ((8,), Axes.SLOT),
        "state/frames/held": ((), Axes.SLOT),
        "state/frames/observation": ((1,), Axes.SLOT),
    }
    assert rules.schema.by_name["mask/action"].shape == (6,)
    assert "begins" in rules.schema.by_name
    plain = make_model(loaded()).specification.schema
    assert plain == fragment_schema(*spaces(EnvironmentSection()))


ON_HARDWARE: dict[str, tuple[int, dict[str, Any], str]] = {
    "tokens": (2, {"algorithm": {"name": "token_ppo"}}, "algorithm.name='token_ppo'"),
    "compiled-tokens": (
        1,
        {"algorithm": {"name": "token_ppo"}, "learner": {"compile": True}},
        "algorithm.name='token_ppo'",
    ),
    "replay": (2, {"algorithm": {"name": "dqn"}}, r"algorithm.name='dqn': .*there are 2; use impala or"),
    "clone": (2, {"algorithm": {"name": "clone"}}, r"algorithm.name='clone': .*learner.ranks=1"),
    "recurrent": (2, {"policy": {"recurrent": "gru"}}, r"policy.recurrent='gru': .*learner.ranks=1"),
    "record": (2, {"learner": {"record": "r"}}, r"learner.record='r': .*learner.ranks=1"),
    "recording": (2, {"learner": {"feed_from": "r"}}, r"learner.feed_from='r': .*learner.ranks=1"),
    "bfloat16-sac": (
        1,
        {"algorithm": {"name": "sac"}, "learner": {"precision": "bfloat16"}},
        r"learner.precision='bfloat16': algorithm.name='sac'.*leave it at its default",
    ),
    "compiled-core": (
        1,
        {"policy": {"recurrent": "lstm"}, "learner": {"compile": True}},
        r"learner.compile=true: .*policy.recurrent='lstm'",
    ),
    "compiled-dropout": (
        1,
        {"policy": {"dropout": 0.1}, "learner": {"compile": True}},
        r"learner.compile=true: .*policy.dropout=0.1",
    ),
}


@pytest.mark.parametrize(("ranks", "layer", "message"), ON_HARDWARE.values(), ids=ON_HARDWARE)
def test_settings_that_the_hardware_does_not_support_are_refused(
    ranks: int, layer: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_hardware(loaded(**layer), ranks)


def test_what_several_ranks_share_and_mixed_precision_of_tokens_are_not_refused() -> None:
    policy = {"hidden_norm": "batch", "dropout": 0.1, "frame_stack": 2}
    for name in ("ppo", "impala", "reinforce"):
        check_hardware(loaded(algorithm={"name": name}, policy=policy), 2)
    check_hardware(loaded(algorithm={"name": "token_ppo"}, learner={"precision": "bfloat16"}), 1)


class OnPolicyClone(OnPolicySection):
    """Says, as its base does, that its algorithm computes on any hardware."""

    name: Literal["clone"] = "clone"


@pytest.mark.parametrize(
    ("ranks", "layer"), [(2, {}), (1, {"compile": True}), (1, {"precision": "bfloat16"})]
)
def test_hardware_is_refused_for_an_algorithm_that_takes_none(ranks: int, layer: dict[str, Any]) -> None:
    settings = loaded(learner=layer)
    with pytest.raises(ConfigurationError, match="algorithm.name='clone'"):
        check_hardware(settings.model_copy(update={"algorithm": OnPolicyClone()}), ranks)
