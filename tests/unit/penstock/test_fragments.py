from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.protocol.fragment import Fragment, Slot, WeightSpan, build, check
from penstock.protocol.limits import MAX_ATTRIBUTES_BYTES, MAX_MESSAGE_BYTES, MAX_RANK, MAX_SLOTS
from penstock.protocol.spaces import (
    MAX_DEPTH,
    Box,
    Dict,
    Discrete,
    MultiBinary,
    Tuple,
    flatten,
    from_proto,
    unflatten,
)
from penstock.protocol.tensor import all_finite, check_shape, from_tensor, read_array, to_tensor
from penstock.v1 import tensor_pb2 as pb
from tests.support.experience.fragment_messages import RUN, SCHEMA, arrays_of, fragment_of, header_of


def change_entry(fragment: Fragment, tensor: str, /, **fields: object) -> Fragment:
    entries = tuple(
        entry._replace(**fields) if entry.name == tensor else entry  # type: ignore[arg-type]
        for entry in fragment.header.tensors
    )
    return replace(fragment, header=replace(fragment.header, tensors=entries))


@pytest.mark.promise("learner-reads-exactly-actor")
def test_reading_copies_nothing_and_cannot_be_written_to() -> None:
    fragment = fragment_of()
    reward = fragment.arrays()["reward"]
    assert np.shares_memory(reward, np.frombuffer(fragment.payload, np.uint8))
    message = from_tensor("x", pb.Tensor(dtype="uint8", shape=[2], data=b"ab"))
    for array in (reward, message):
        assert not array.flags.owndata
        assert not array.flags.writeable


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
    "a slot too many": (
        {"slots": tuple(Slot(index, 0, 0) for index in range(MAX_SLOTS + 1)), "weights": ()},
        f"N={MAX_SLOTS + 1} must be",
    ),
    "long attributes": ({"attributes": bytes(MAX_ATTRIBUTES_BYTES + 1)}, "1025 bytes, 1024 allowed"),
    "a long group": ({"group_id": "g" * 129}, "header.group_id: 129 characters, 128 allowed"),
    "no weights": ({"weights": ()}, "0 spans"),
    "weights beyond the last step": ({"weights": (WeightSpan(0, 3, 3, 1, 0),)}, "does not fit T=5"),
    "weights of a slot that is not there": ({"weights": (WeightSpan(3, 0, 5, 1, 0),)}, "N=3"),
    "version 0": ({"weights": (WeightSpan(0, 0, 5, 0, 0),)}, "names no version"),
}


@pytest.mark.parametrize(("fields", "message"), HEADER_FAULTS.values(), ids=HEADER_FAULTS.keys())
def test_a_wrong_header_is_refused_by_name(fields: dict[str, object], message: str) -> None:
    fragment = fragment_of()
    header = replace(fragment.header, **fields)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        check(replace(fragment, header=header), SCHEMA, RUN)


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
    header = replace(fragment.header, tensors=(*entries[:-1], entries[0]))
    with pytest.raises(ValueError, match="give each tensor of the schema once"):
        check(replace(fragment, header=header), SCHEMA, RUN)


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
    check(fragment, SCHEMA, RUN, {"reward": 1e6, "log_prob": 1e6})
    check(fragment, SCHEMA, RUN)
    bounds = {"reward": 1e5, "log_prob": 1e5}
    with pytest.raises(ValueError, match=rf"{name}: holds ±1e\+06, and broker.max_{name}=100000; .*raise it"):
        check(fragment, SCHEMA, RUN, bounds)


def test_a_dtype_that_the_wire_does_not_know_cannot_be_sent() -> None:
    with pytest.raises(ValueError, match="complex128"):
        to_tensor(np.zeros(2, np.complex128))
    arrays = arrays_of(SCHEMA, 5, 3) | {"reward": np.array([["a"]], dtype=object)}
    with pytest.raises(ValueError, match="reward: dtype 'object' is not one of"):
        build(header_of(SCHEMA, 5, 3), arrays)


@pytest.mark.promise("table-reads-outside-payload")
def test_a_frame_larger_than_declared_is_refused_before_decoding() -> None:
    arrays = arrays_of(SCHEMA, 5, 3) | {"reward": np.zeros(2**20, np.float32)}
    fragment = build(header_of(SCHEMA, 5, 3), arrays, ("reward",))
    lying = change_entry(fragment, "reward", shape=(5, 3), raw_size=60)
    with pytest.raises(ValueError, match="reward: decodes to 61 bytes, 60 declared"):
        check(lying, SCHEMA, RUN)
    payload = bytearray(fragment.payload)
    payload[next(entry.offset for entry in fragment.header.tensors if entry.name == "reward")] ^= 0xFF
    with pytest.raises(ValueError, match="reward: not an lz4 frame"):
        check(replace(lying, payload=bytes(payload)), SCHEMA, RUN)


BOX = Box(np.array([-1.0, -np.inf], np.float32), np.array([1.0, np.inf], np.float32))
NESTED = Dict((("a", Tuple((Discrete(3, -1), BOX))), ("b", MultiBinary(4))))


def test_boxes_are_equal_by_dtype_shape_and_bounds() -> None:
    assert Box(np.zeros(2, np.float32), np.ones(2, np.float32)) == Box(
        np.zeros(2, np.float32), np.ones(2, np.float32)
    )
    assert Box(np.zeros(2, np.float32), np.ones(2, np.float32)) != Box(np.zeros(2), np.ones(2))
    assert Box(np.zeros(2), np.ones(2)) != Box(np.zeros(2), np.full(2, 2.0))


def test_a_value_is_flattened_and_put_together_again() -> None:
    value: dict[str, Any] = {"a": (1, np.array([0.5, 2.0])), "b": np.array([0, 1, 0, 1])}
    flat = flatten(NESTED, value, "x")
    assert list(flat) == ["x/a/0", "x/a/1", "x/b"]
    back = unflatten(NESTED, flat, "x")
    assert back["a"][0] == 1
    assert back["a"][1] is value["a"][1]
    assert back["b"] is value["b"]


def test_bounds_that_disagree_are_refused() -> None:
    with pytest.raises(ValueError, match="Box: low is"):
        Box(np.zeros(2), np.ones(3))


def deep(levels: int) -> pb.Space:
    message = pb.Space(discrete=pb.Space.Discrete(n=2))
    for _ in range(levels):
        message = pb.Space(tuple=pb.Space.Tuple(spaces=[message]))
    return message


FAULTS: dict[str, tuple[pb.Space, str]] = {
    "no kind": (pb.Space(), "action_space: the space has no kind"),
    "no value": (pb.Space(discrete=pb.Space.Discrete(n=0)), r"Discrete\(n=0\) has no value"),
    "keys missing": (
        pb.Space(dict=pb.Space.Dict(keys=["a"], spaces=[])),
        "1 keys for 0 spaces",
    ),
    "too deep": (deep(MAX_DEPTH + 2), f"nests deeper than {MAX_DEPTH}"),
    "bounds without bytes": (
        pb.Space(box=pb.Space.Box(low=pb.Tensor(dtype="float32", shape=[2]))),
        "action_space.low: 8 bytes at 0 are needed",
    ),
}


@pytest.mark.parametrize(("message", "error"), FAULTS.values(), ids=FAULTS.keys())
def test_a_malformed_space_is_refused_by_name(message: pb.Space, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        from_proto("action_space", message)


@pytest.mark.parametrize("dtype", ["object", "complex64", "str96", "datetime64", ">f4", "O", "float128", ""])
def test_a_dtype_outside_the_list_is_refused_with_the_list(dtype: str) -> None:
    with pytest.raises(ValueError, match=r"reward: dtype .* is not one of bool, uint8"):
        read_array("reward", b"", dtype, (0,))


@pytest.mark.parametrize(
    "shape", [(1,) * (MAX_RANK + 1), (-1,), (-1, -1), (MAX_MESSAGE_BYTES + 1,), (2**40, 2**40), (2**62, 0)]
)
def test_a_forbidden_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="x: "):
        check_shape("x", shape)


@pytest.mark.parametrize(("data", "offset"), [(b"\0" * 7, 0), (b"\0" * 8, 1), (b"\0" * 8, -1), (b"", 0)])
def test_too_few_bytes_are_refused(data: bytes, offset: int) -> None:
    with pytest.raises(ValueError, match=rf"x: 8 bytes at {offset} are needed, {len(data)} are there"):
        read_array("x", data, "float32", (2,), offset)
    with pytest.raises(ValueError, match="x: 9 bytes for 8 of content"):
        from_tensor("x", pb.Tensor(dtype="float32", shape=[2], data=b"\0" * 9))


@pytest.mark.parametrize("size", [1, 7, 5000])
@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_numbers_that_are_not_finite_are_found_wherever_they_are(kind: type[np.floating], size: int) -> None:
    assert all_finite(np.zeros((0, 3), kind))
    for largest in (1.0, np.finfo(kind).max, -np.finfo(kind).max):
        array = np.full((size, 2), largest, kind)
        assert all_finite(array)
        assert all_finite(array.T)
        for wrong in (np.nan, np.inf, -np.inf):
            array[size // 2, 1] = wrong
            assert not all_finite(array)
            assert not all_finite(array.T)
