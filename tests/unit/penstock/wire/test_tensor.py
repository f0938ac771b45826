import numpy as np
import pytest

from penstock.protocol.limits import MAX_MESSAGE_BYTES, MAX_RANK
from penstock.protocol.tensor import DTYPES, all_finite, check_shape, from_tensor, read_array, to_tensor
from penstock.v1 import tensor_pb2 as pb


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4)])
def test_every_allowed_dtype_and_shape_comes_back(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    back = from_tensor("x", pb.Tensor.FromString(to_tensor(array).SerializeToString()))
    assert (array.dtype, array.shape) == (back.dtype, back.shape)
    np.testing.assert_array_equal(array, back)


@pytest.mark.parametrize("dtype", ["object", "complex64", "str96", "datetime64", ">f4", "O", "float128", ""])
def test_a_dtype_outside_the_list_is_refused_with_the_list(dtype: str) -> None:
    with pytest.raises(ValueError, match=r"reward: dtype .* is not one of bool, uint8"):
        read_array("reward", b"", dtype, (0,))


def test_an_array_that_cannot_travel_is_refused_when_it_is_packed() -> None:
    with pytest.raises(ValueError, match="complex128"):
        to_tensor(np.zeros(2, np.complex128))


@pytest.mark.parametrize(
    "shape", [(1,) * (MAX_RANK + 1), (-1,), (-1, -1), (MAX_MESSAGE_BYTES + 1,), (2**40, 2**40), (2**62, 0)]
)
def test_a_shape_that_no_message_may_have_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="x: "):
        check_shape("x", shape)


@pytest.mark.parametrize(("data", "offset"), [(b"\0" * 7, 0), (b"\0" * 8, 1), (b"\0" * 8, -1), (b"", 0)])
def test_bytes_that_do_not_reach_are_refused(data: bytes, offset: int) -> None:
    with pytest.raises(ValueError, match=rf"x: 8 bytes at {offset} are needed, {len(data)} are there"):
        read_array("x", data, "float32", (2,), offset)


def test_a_tensor_message_holds_exactly_its_array() -> None:
    with pytest.raises(ValueError, match="x: 9 bytes for 8 of content"):
        from_tensor("x", pb.Tensor(dtype="float32", shape=[2], data=b"\0" * 9))


def test_the_array_of_a_message_is_a_read_only_view() -> None:
    array = from_tensor("x", pb.Tensor(dtype="uint8", shape=[2], data=b"ab"))
    assert not array.flags.writeable
    assert not array.flags.owndata


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
