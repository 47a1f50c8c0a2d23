from __future__ import annotations

import pytest
import trio

from microvm.errors import CapacityError, MicrovmError, RequestError
from microvm.web.calls import new_trace_id
from microvm.web.failures import collapse, describe, public
from microvm.web.settings import WebSettings


async def _cancelled() -> trio.Cancelled:
    with trio.CancelScope() as scope:
        scope.cancel()
        try:
            await trio.lowlevel.checkpoint()
        except trio.Cancelled as error:
            return error
    raise AssertionError("a cancelled scope did not cancel")


async def test_an_error_beside_a_cancellation_wins() -> None:
    wanted = RequestError("not_found", "no")
    group = BaseExceptionGroup("", [await _cancelled(), wanted])
    assert collapse(group) is wanted


async def test_pure_cancellation_goes_on() -> None:
    group = BaseExceptionGroup("", [await _cancelled(), BaseExceptionGroup("", [await _cancelled()])])
    with pytest.raises(BaseExceptionGroup) as caught:
        collapse(group)
    assert caught.value is group


def test_an_interrupt_is_never_answered() -> None:
    group = BaseExceptionGroup("", [KeyboardInterrupt(), ValueError()])
    with pytest.raises(BaseExceptionGroup):
        collapse(group)


def test_one_of_ours_stands_for_a_group_and_the_rest_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    wanted = CapacityError("no_capacity", "full")
    assert collapse(ExceptionGroup("", [ValueError("a secret"), wanted])) is wanted
    assert "ValueError" in caplog.text
    assert "a secret" not in caplog.text


def test_a_description_holds_the_type_and_not_the_message() -> None:
    text = describe(ValueError("a secret"))
    assert "ValueError" in text
    assert "a secret" not in text


def test_what_is_not_ours_becomes_internal_under_its_trace_id() -> None:
    error = public(OSError("a secret"), "abc")
    assert (error.code, error.detail) == ("internal", {"trace_id": "abc"})
    assert "a secret" not in error.message


def test_ours_goes_out_as_it_is() -> None:
    error = MicrovmError("vm_failed", "it died")
    assert public(error, "abc") is error


@pytest.mark.parametrize(
    "header",
    [None, "", "00-x", "00-" + "0" * 32 + "-1-01", "00-" + "A" * 32 + "-1-01", "00-" + "g" * 32 + "-1-1"],
)
def test_a_malformed_trace_parent_is_replaced(header: str | None) -> None:
    assert len(new_trace_id(header)) == 32
    assert new_trace_id(header) != new_trace_id(header)


@pytest.mark.parametrize(
    ("listen", "loopback"),
    [
        ("127.0.0.1:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("", True),
        ("0.0.0.0:1", False),
        ("h:1", False),
    ],
)
def test_loopback_is_what_only_this_machine_reaches(listen: str, loopback: bool) -> None:
    assert WebSettings(listen=listen).loopback is loopback


@pytest.mark.parametrize("listen", ["8090", "host", ":8090", "host:x"])
def test_an_address_without_host_or_port_is_refused(listen: str) -> None:
    with pytest.raises(ValueError, match="not host:port"):
        _ = WebSettings(listen=listen).address
