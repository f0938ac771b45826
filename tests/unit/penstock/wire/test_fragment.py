from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from penstock.protocol import fragment as wire
from penstock.protocol.fragment import Fragment, FragmentHeader, Slot, WeightSpan, build, check, read_payload
from penstock.protocol.limits import MAX_ATTRIBUTES_BYTES, MAX_SLOTS
from tests.support.experience.whole_fragments import RUN, SCHEMA, arrays_of, fragment_of, header_of


def change_entry(fragment: Fragment, tensor: str, /, **fields: object) -> Fragment:
    """The fragment with one row of its table changed."""
    entries = tuple(
        entry._replace(**fields) if entry.name == tensor else entry  # type: ignore[arg-type]
        for entry in fragment.header.tensors
    )
    return replace(fragment, header=replace(fragment.header, tensors=entries))


def change_header(fragment: Fragment, **fields: object) -> Fragment:
    """The fragment with fields of its header changed."""
    return replace(fragment, header=replace(fragment.header, **fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("ends", [0, 1, 4])
@pytest.mark.parametrize("compress", [(), ("observation/camera", "final/observation/camera", "reward")])
def test_what_is_built_follows_the_schema_and_reads_back(ends: int, compress: tuple[str, ...]) -> None:
    fragment = fragment_of(ends=ends, compress=compress)
    check(fragment, SCHEMA, RUN)
    expected = arrays_of(SCHEMA, 5, 3, ends)
    actual = fragment.arrays()
    assert list(expected) == list(actual)
    for name, array in expected.items():
        assert array.dtype == actual[name].dtype
        np.testing.assert_array_equal(array, actual[name])


@pytest.mark.promise("learner-reads-exactly-actor")
def test_reading_copies_nothing_and_cannot_be_written_to() -> None:
    fragment = fragment_of()
    reward = fragment.arrays()["reward"]
    assert not reward.flags.owndata
    assert not reward.flags.writeable
    assert np.shares_memory(reward, np.frombuffer(fragment.payload, np.uint8))


def test_a_payload_may_be_read_from_a_memoryview() -> None:
    fragment = fragment_of(compress=("reward",))
    arrays = read_payload(fragment.header, memoryview(fragment.payload))
    np.testing.assert_array_equal(fragment.arrays()["reward"], arrays["reward"])


def test_a_strided_array_is_packed_in_row_order() -> None:
    arrays = arrays_of(SCHEMA, 5, 3)
    arrays["reward"] = np.asfortranarray(arrays["reward"])
    fragment = build(header_of(SCHEMA, 5, 3), arrays)
    np.testing.assert_array_equal(arrays["reward"], fragment.arrays()["reward"])


def test_charge_counts_every_step_and_staleness_the_oldest_weights() -> None:
    header = replace(header_of(SCHEMA, 5, 3), weights=(WeightSpan(0, 0, 2, 9, 6), WeightSpan(0, 2, 3, 8, 7)))
    assert header.charge == 15
    assert header.oldest_update == 6
    assert header.oldest_version == 8


HEADER_FAULTS: dict[str, tuple[dict[str, object], str]] = {
    "another run": ({"run": "other"}, r"header\.run='other': this broker serves"),
    "a policy that is no id": ({"policy": "Ünfug"}, r"header\.policy"),
    "another schema": ({"schema_id": "0" * 64}, r"header\.schema_id=000000000000…"),
    "session 0": ({"session": 0}, "both start at 1"),
    "sequence 0": ({"sequence": 0}, "both start at 1"),
    "no step": ({"steps": 0}, "T=0"),
    "no slot": ({"slots": ()}, "N=0"),
    "long attributes": ({"attributes": bytes(MAX_ATTRIBUTES_BYTES + 1)}, "1025 bytes, 1024 allowed"),
    "a long group": ({"group_id": "g" * 129}, "header.group_id: 129 characters, 128 allowed"),
    "no weights": ({"weights": ()}, "0 spans"),
    "weights beyond the last step": ({"weights": (WeightSpan(0, 3, 3, 1, 0),)}, "does not fit T=5"),
    "weights of a slot that is not there": ({"weights": (WeightSpan(3, 0, 5, 1, 0),)}, "N=3"),
    "version 0": ({"weights": (WeightSpan(0, 0, 5, 0, 0),)}, "names no version"),
}


@pytest.mark.parametrize(("fields", "message"), HEADER_FAULTS.values(), ids=HEADER_FAULTS.keys())
def test_a_wrong_header_is_refused_by_name(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(change_header(fragment_of(), **fields), SCHEMA, RUN)


ENTRY_FAULTS: dict[str, tuple[str, dict[str, object], str]] = {
    "dtype": ("reward", {"dtype": "float64"}, "reward: dtype float64, the schema says float32"),
    "shape": ("reward", {"shape": (5, 4)}, r"reward: shape \(5, 4\), the schema says \(5, 3\)"),
    "one observation too few": (
        "observation/joint",
        {"shape": (5, 3, 4)},
        r"the schema says \(6, 3, 4\)",
    ),
    "an absurd rank": ("reward", {"shape": (1,) * 1000}, "rank 1000 is above 8"),
    "a product that overflows": ("reward", {"shape": (2**62, 4)}, "too large axis"),
    "ends that differ": ("final/step", {"shape": (2,)}, r"final/step: shape \(2,\)"),
    "ends without an axis": ("final/observation/camera", {"shape": ()}, r"shape \(\), one row per"),
    "raw size": ("reward", {"raw_size": 61}, "raw_size 61, 60 expected"),
    "stored size": ("reward", {"stored_size": 61}, "stored_size 61, 60 expected"),
    "codec": ("reward", {"codec": "zip"}, "codec 'zip' is not one of raw, lz4"),
    "offset": ("reward", {"offset": 1}, "reward: offset 1"),
    "name": ("reward", {"name": "prize"}, r"missing \['reward'\], not in the schema \['prize'\]"),
}


@pytest.mark.promise("fragment-breaks-run-s")
@pytest.mark.parametrize(("name", "fields", "message"), ENTRY_FAULTS.values(), ids=ENTRY_FAULTS.keys())
def test_a_wrong_table_is_refused_by_name(name: str, fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(change_entry(fragment_of(), name, **fields), SCHEMA, RUN)


def test_a_tensor_given_twice_is_refused() -> None:
    fragment = fragment_of()
    entries = fragment.header.tensors
    with pytest.raises(ValueError, match="give each tensor of the schema once"):
        check(change_header(fragment, tensors=(*entries[:-1], entries[0])), SCHEMA, RUN)


@pytest.mark.parametrize("payload", [b"", b"x", None])
def test_a_payload_of_another_length_is_refused(payload: bytes | None) -> None:
    fragment = fragment_of()
    wrong = bytes(fragment.payload) + b"x" if payload is None else payload
    with pytest.raises(ValueError, match=rf"payload: {len(wrong)} bytes, the table describes"):
        check(replace(fragment, payload=wrong), SCHEMA, RUN)


def test_more_ends_than_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="16 ended episodes in 15 steps"):
        check(fragment_of(ends=16), SCHEMA, RUN)


@pytest.mark.promise("fragment-breaks-run-s")
@pytest.mark.parametrize("compress", [(), ("reward", "log_prob")])
@pytest.mark.parametrize("name", ["reward", "log_prob"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_is_refused(name: str, value: float, compress: tuple[str, ...]) -> None:
    arrays = arrays_of(SCHEMA, 5, 3)
    arrays[name][2, 1] = value
    with pytest.raises(ValueError, match=f"{name}: holds NaN or infinity"):
        check(build(header_of(SCHEMA, 5, 3), arrays, compress), SCHEMA, RUN)


@pytest.mark.promise("reward-log-probability-beyond")
@pytest.mark.parametrize("name", ["reward", "log_prob"])
@pytest.mark.parametrize("value", [1e6, -1e6])
def test_a_number_beyond_the_bound_of_the_run_is_refused(name: str, value: float) -> None:
    arrays = arrays_of(SCHEMA, 5, 3)
    arrays[name][2, 1] = value
    fragment = build(header_of(SCHEMA, 5, 3), arrays)
    wire.check(fragment, SCHEMA, RUN, {"reward": 1e6, "log_prob": 1e6})
    wire.check(fragment, SCHEMA, RUN)
    bounds = {"reward": 1e5, "log_prob": 1e5}
    with pytest.raises(ValueError, match=rf"{name}: holds ±1e\+06, and broker.max_{name}=100000; .*raise it"):
        wire.check(fragment, SCHEMA, RUN, bounds)


def test_a_dtype_that_the_wire_does_not_know_cannot_be_built() -> None:
    arrays = arrays_of(SCHEMA, 5, 3) | {"reward": np.array([["a"]], dtype=object)}
    with pytest.raises(ValueError, match="reward: dtype 'object' is not one of"):
        build(header_of(SCHEMA, 5, 3), arrays)


def corrupt(fragment: Fragment, edit: Callable[[bytearray], None]) -> Fragment:
    """The fragment with its payload edited."""
    payload = bytearray(fragment.payload)
    edit(payload)
    return replace(fragment, payload=bytes(payload))


@pytest.mark.promise("table-reads-outside-payload")
def test_a_frame_that_decodes_to_more_than_it_says_is_refused_before_it_is_decoded() -> None:
    arrays = arrays_of(SCHEMA, 5, 3) | {"reward": np.zeros(2**20, np.float32)}
    fragment = build(header_of(SCHEMA, 5, 3), arrays, ("reward",))
    lying = change_entry(fragment, "reward", shape=(5, 3), raw_size=60)
    with pytest.raises(ValueError, match="reward: decodes to 61 bytes, 60 declared"):
        check(lying, SCHEMA, RUN)


def test_bytes_that_are_no_frame_are_refused() -> None:
    fragment = fragment_of(compress=("reward",))
    entry = next(e for e in fragment.header.tensors if e.name == "reward")

    def flip(payload: bytearray) -> None:
        payload[entry.offset] ^= 0xFF

    with pytest.raises(ValueError, match="reward: not an lz4 frame"):
        check(corrupt(fragment, flip), SCHEMA, RUN)


def test_the_largest_number_of_slots_is_allowed_and_one_more_is_not() -> None:
    header = replace(
        header_of(SCHEMA, 1, 1), slots=tuple(Slot(i, 0, 0) for i in range(MAX_SLOTS + 1)), weights=()
    )
    assert isinstance(header, FragmentHeader)
    with pytest.raises(ValueError, match=f"N={MAX_SLOTS + 1} must be"):
        check(Fragment(header, b""), SCHEMA, RUN)
