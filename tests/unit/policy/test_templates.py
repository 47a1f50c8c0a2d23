"""One build per key, everybody else waits, and nothing goes while it is used."""

from __future__ import annotations

from microvm.policy import templates
from microvm.policy.templates import (
    Build,
    BuildFailed,
    Built,
    CancelBuild,
    Deny,
    Destroy,
    Done,
    Drain,
    Grant,
    Leave,
    Retire,
    Templates,
    Want,
)


def run(
    *events: templates.Event, ledger: Templates | None = None
) -> tuple[Templates, tuple[templates.Effect, ...]]:
    ledger, effects = ledger or Templates(), ()
    for event in events:
        ledger, effects = templates.decide(ledger, event, 1.0)
    return ledger, effects


def test_the_first_want_builds_and_all_that_waited_are_granted_in_order() -> None:
    assert run(Want("k", 1))[1] == (Build("k"),)
    assert run(Want("k", 1), Want("k", 2))[1] == ()
    assert run(Want("k", 1), Want("k", 2), Built("k"))[1] == (Grant("k", 1), Grant("k", 2))
    assert run(Want("k", 1), Built("k"), Want("k", 2))[1] == (Grant("k", 2),)


def test_keys_do_not_wait_for_each_other() -> None:
    assert run(Want("k", 1), Want("other", 2))[1] == (Build("other"),)


def test_a_failed_build_tells_all_waiters_why_and_the_next_want_tries_again() -> None:
    ledger, effects = run(Want("k", 1), Want("k", 2), BuildFailed("k", "no space", "disk_full"))
    assert [(e.waiter, e.code) for e in effects if isinstance(e, Deny)] == [
        (1, "disk_full"),
        (2, "disk_full"),
    ]
    assert all("no space" in e.message for e in effects if isinstance(e, Deny))
    assert run(Want("k", 3), ledger=ledger)[1] == (Build("k"),)


def test_who_left_is_not_granted_and_the_build_goes_on() -> None:
    assert run(Want("k", 1), Want("k", 2), Leave("k", 1), Built("k"))[1] == (Grant("k", 2),)
    ledger, effects = run(Want("k", 1), Leave("k", 1), Built("k"))
    assert effects == ()
    assert run(Want("k", 2), ledger=ledger)[1] == (Grant("k", 2),)


def test_an_unused_template_goes_at_once_and_a_used_one_after_its_last_copy() -> None:
    assert run(Want("k", 1), Built("k"), Done("k"), Retire("k"))[1] == (Destroy("k"),)
    ledger, effects = run(Want("k", 1), Want("k", 2), Built("k"), Retire("k"), Done("k"))
    assert effects == ()
    assert run(Done("k"), ledger=ledger)[1] == (Destroy("k"),)


def test_a_want_for_a_retired_template_waits_and_is_built_anew() -> None:
    ledger, effects = run(Want("k", 1), Built("k"), Retire("k"), Want("k", 2), Want("k", 3))
    assert effects == ()
    ledger, effects = run(Leave("k", 3), Done("k"), ledger=ledger)
    assert effects == (Destroy("k"), Build("k"))
    assert run(Built("k"), ledger=ledger)[1] == (Grant("k", 2),)


def test_a_build_that_nobody_wants_any_more_is_destroyed_when_done() -> None:
    assert run(Want("k", 1), Leave("k", 1), Retire("k"), Built("k"))[1] == (Destroy("k"),)
    ledger, effects = run(Want("k", 1), Retire("k"), Built("k"))
    assert effects == (Grant("k", 1),)
    assert run(Done("k"), ledger=ledger)[1] == (Destroy("k"),)


def test_a_drain_kills_builds_tells_waiters_and_builds_nothing_more() -> None:
    ledger, effects = run(Want("k", 1), Drain())
    assert effects[0] == CancelBuild("k")
    assert [(e.waiter, e.code) for e in effects if isinstance(e, Deny)] == [(1, "draining")]
    assert run(BuildFailed("k", "killed"), ledger=ledger) == (Templates(draining=True), ())
    _, effects = run(Want("k", 2), ledger=ledger)
    assert [e.code for e in effects if isinstance(e, Deny)] == ["draining"]


def test_templates_found_at_start_up_are_ready() -> None:
    assert run(Want("k", 1), ledger=templates.restart(["k"], 0.0))[1] == (Grant("k", 1),)
