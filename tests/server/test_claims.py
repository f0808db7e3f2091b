"""One run and one scope at a time own an engine."""

import pytest

from podium.server.door import Refusal
from podium.server.served import Claims


def test_a_second_run_is_told_who_was_first() -> None:
    claims = Claims()
    claims.take("first", "run")
    claims.take("first", "run")  # after a resume
    with pytest.raises(Refusal, match="claimed by run 'first'"):
        claims.take("second", "run")
    assert claims.run == "first"
    assert claims.release("second") is None
    assert claims.release("first") == "run"
    claims.take("second", "run")


def test_scopes_are_not_mixed_and_both_are_named() -> None:
    claims = Claims()
    claims.take("first", "engine")
    with pytest.raises(Refusal, match="scope 'engine', not 'run'"):
        claims.take("first", "run")
    assert claims.release("first") == "engine"
    with pytest.raises(Refusal, match=r"run 'first' .scope 'engine'.; scope 'run'"):
        claims.take("second", "run")
    claims.take("second", "engine")


def test_only_the_owner_changes_weights_and_a_run_that_lost_its_claim_is_told() -> None:
    claims = Claims()
    claims.check_writer(None)
    claims.take("first", "run")
    claims.check_writer("first")
    claims.check(None)
    for other in (None, "second"):
        with pytest.raises(Refusal, match="'first'"):
            claims.check_writer(other)
    with pytest.raises(Refusal, match="'second' has no claim"):
        claims.check("second")


def test_a_silent_run_is_replaced_and_finds_out() -> None:
    claims = Claims(idle_s=0.0)
    claims.take("first", "run")
    claims.take("second", "run")
    with pytest.raises(Refusal, match="run 'first' has no claim on this engine, run 'second' has"):
        claims.check("first")
