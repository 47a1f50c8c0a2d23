"""One build per key, everybody else waits, and nothing goes while it is used."""

from __future__ import annotations

from microvm.policy import templates
from microvm.policy.templates import (
    KEPT,
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


def made(*keys: str, ledger: Templates | None = None) -> tuple[Templates, list[str]]:
    """Templates that were each wanted, built and copied once, in this order; and which went for them."""
    ledger, gone = ledger or Templates(), list[str]()
    for now, key in enumerate(keys, start=len(ledger.entries)):
        for event in (Want(key, 1), Built(key), Done(key)):
            ledger, effects = templates.decide(ledger, event, float(now))
            gone += [effect.key for effect in effects if isinstance(effect, Destroy)]
    return ledger, gone


def test_a_template_too_many_takes_the_place_of_the_least_recently_used() -> None:
    ledger, gone = made(*(str(number) for number in range(KEPT)))
    assert not gone
    ledger, _ = templates.decide(ledger, Want("0", 2), 1000.0)
    ledger, _ = templates.decide(ledger, Done("0"), 1001.0)
    ledger, gone = made("more", "yet more", ledger=ledger)
    assert gone == ["1", "2"]
    assert len(ledger.entries) == KEPT


def test_templates_that_are_being_copied_stay_until_that_is_done() -> None:
    ledger, gone = Templates(), list[str]()
    for number in range(KEPT + 2):
        ledger, effects = run(Want(str(number), number), Built(str(number)), ledger=ledger)
        assert not any(isinstance(effect, Destroy) for effect in effects)
    for number in range(KEPT + 2):
        ledger, effects = run(Done(str(number)), ledger=ledger)
        gone += [effect.key for effect in effects if isinstance(effect, Destroy)]
    assert gone == ["0", "1"]


def test_a_build_is_wanted_as_long_as_somebody_waits_for_it() -> None:
    ledger, _ = run(Want("k", 1), Want("k", 2), Leave("k", 1))
    assert templates.is_wanted(ledger, "k")
    ledger, _ = run(Leave("k", 2), ledger=ledger)
    assert not templates.is_wanted(ledger, "k")


def test_templates_found_at_start_up_are_ready() -> None:
    assert run(Want("k", 1), ledger=templates.restart(["k"], 0.0))[1] == (Grant("k", 1),)
