"""The experience of a session, and the weights that each slot acted with, only move forward."""

from penstock.launch.audit.books import SessionHistory
from penstock.launch.audit.findings import Kind


def test_weights_of_a_slot_that_go_back_are_found() -> None:
    history = SessionHistory(session=1)
    assert list(history.follow(1, [(0, 0, 0)], [(7, 7)])) == []
    assert list(history.follow(2, [(0, 0, 4)], [(8, 8)])) == []
    (problem,) = history.follow(3, [(0, 0, 8)], [(7, 7)])
    assert problem.kind is Kind.ORDER


def test_episodes_of_a_policy_server_take_newer_weights_each_in_its_own_time() -> None:
    history = SessionHistory(session=1)
    assert list(history.follow(1, [(0, 1, 0)], [(8, 8)])) == []
    assert list(history.follow(2, [(1, 2, 0)], [(7, 7)])) == []
    assert list(history.follow(3, [(1, 2, 4)], [(8, 8)])) == []
