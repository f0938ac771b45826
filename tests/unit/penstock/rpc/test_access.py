"""Which party may call what, of the core's servers and of a workload's."""

from typing import Final

from penstock.rpc.auth import ACCESS, ACTOR, may_call
from penstock.rpc.identity import Party

OWN: Final = {"/outside.Service/Ask": ACTOR, "/penstock.v1.ControlService/Stop": ACTOR}


def test_the_calls_of_a_workload_are_served_to_the_parties_that_it_names() -> None:
    assert may_call(Party.ACTOR, "/outside.Service/Ask", OWN)
    assert not may_call(Party.CLIENT, "/outside.Service/Ask", OWN)
    assert not may_call(Party.ACTOR, "/outside.Service/Ask")
    assert not may_call(Party.ACTOR, "/penstock.v1.ControlService/Stop", OWN)


def test_a_call_that_no_table_has_is_served_to_no_party() -> None:
    assert not any(may_call(party, "/outside.Service/Tell", OWN) for party in Party)
    assert all(
        may_call(party, path) == (party in parties) for path, parties in ACCESS.items() for party in Party
    )
