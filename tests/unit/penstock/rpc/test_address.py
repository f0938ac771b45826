"""Addresses, and where plaintext may go."""

import pytest

from penstock.rpc.address import check_address, check_plaintext, is_local


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "localhost:50051", "[::1]:50051", "unix:/tmp/x", "127.8.0.1:1"]
)
def test_loopback_and_unix_sockets_are_local(address: str) -> None:
    assert is_local(address)
    check_plaintext(address, insecure=False)


@pytest.mark.parametrize(
    "address", ["0.0.0.0:1", "broker:50051", "10.0.0.1:1", "[::]:1", "dns:///broker:50051"]
)
def test_plaintext_beyond_loopback_must_be_asked_for(address: str) -> None:
    with pytest.raises(ValueError, match=r"tls_certificate.*--insecure"):
        check_plaintext(address, insecure=False)
    check_plaintext(address, insecure=True)


@pytest.mark.parametrize(
    "address", ["", "broker", ":50051", "broker:", "broker:x", "broker:70000", "unix:", "unix:" + "x" * 108]
)
def test_a_malformed_address_is_named(address: str) -> None:
    with pytest.raises(ValueError, match="address="):
        check_address(address)
