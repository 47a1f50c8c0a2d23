"""The one task that owns a VM: the only writer of its state.

Others submit requests and wait; the driver decides them one at a time by `policy.lifecycle`, commits the
intent, runs the effect in a child task, and commits its end. While an effect runs, requests wait in order;
identical ones are one; a destroy goes first and cancels whatever runs. What the effects do is in `effects`;
this module must not touch files, processes or guests. It is longer than most because queue, effect and end
share one state that nobody else may see.

    submit ─► queue ─► decide ─► commit intent ─► effect ─► decide(Done | Failed) ─► commit done ─► answer
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import trio

from microvm.errors import CapacityError, GuestError, MicrovmError, RequestError, first_error
from microvm.fleet.effects import EffectError, Effects
from microvm.fleet.live import Live
from microvm.fleet.log import log
from microvm.model import SuspendMode, VmRecord, VmState
from microvm.policy import idle, lifecycle
from microvm.policy.lifecycle import (
    LATER,
    STAY,
    Answer,
    Destroy,
    Done,
    Drain,
    Effect,
    Event,
    Failed,
    Idle,
    OutOfSpace,
    Refusal,
    Step,
    Use,
    VmmDied,
)

DRAINING_RETRY_S: Final = 10.0  # a service that restarts is back by then


class Journal(Protocol):
    """What the driver needs of the store: `journal.VmJournal`, or a double in tests."""

    async def intent(self, record: VmRecord, op: str) -> int:
        """Commits the start of a mutation together with the record as it is from now on."""
        ...

    async def step(self, intent: int, record: VmRecord, name: str) -> None:
        """Commits a point of no return."""
        ...

    async def done(self, intent: int, record: VmRecord, outcome: str) -> None:
        """Commits the end of a mutation together with the record."""
        ...

    async def gone(self, intent: int, record: VmRecord) -> None:
        """Commits the end of the VM."""
        ...


@dataclass(frozen=True, slots=True)
class _Turn:
    """One run of an effect; see `effects.Turn`."""

    driver: VmDriver
    intent: int | None
    before: VmState

    @property
    def record(self) -> VmRecord:
        return self.driver.record

    async def commit(self, step: str, **changes: Any) -> None:
        assert self.intent is not None
        await self.driver.commit_step(self.intent, step, changes)


@dataclass(eq=False, slots=True)
class _Request:
    event: Event
    answered: trio.Event = field(default_factory=trio.Event)
    error: MicrovmError | None = None
    granted: bool = False  # a Use that was let in


_JOINABLE: Final = lifecycle.Suspend | lifecycle.Resume | lifecycle.Stop | Destroy | Drain


class VmDriver:
    """Owns one VM from its first commit to its last.

    Args:
        record: The VM as the store has it.
        journal: Where mutations are committed.
        effects: What does the work.
    """

    def __init__(self, record: VmRecord, journal: Journal, effects: Effects) -> None:
        self.record = record
        self.effects = effects
        self.gone = trio.Event()
        self.changed: Callable[[], None] = lambda: None  # told of each change of the record
        self._journal = journal
        self._queue: list[_Request] = []
        self._bell = trio.Event()
        self._idle = idle.Idle(
            record.idle_seconds, record.idle_mode, last_activity_at=record.last_activity_at
        )
        self._effect_scope: trio.CancelScope | None = None
        self._draining = False
        self._unfit = False  # a wake found that the checkpoint cannot be loaded
        self._create_intent: int | None = None
        self._buried: MicrovmError | None = None
        self._create_error: MicrovmError | None = None

    # ---- for callers ----

    @property
    def busy(self) -> bool:
        """Whether an effect is under way."""
        return self._effect_scope is not None

    @property
    def active(self) -> bool:
        """Whether the VM has a VMM or something to do: whoever ends the service must wait for it."""
        return self.busy or bool(self._queue) or self.effects.live is not None

    @property
    def hibernates_at(self) -> float | None:
        """When the VM will go idle (seconds since the epoch) if nobody touches it; None while it will not."""
        return None if self.busy or self._draining else self._idle.deadline

    @property
    def last_activity_at(self) -> float:
        """When the VM was last used, seconds since the epoch."""
        return self._idle.last_activity_at

    @property
    def overdue(self) -> bool:
        """Whether the VM is past its idle time, and only waits for its turn."""
        deadline = self.hibernates_at
        return deadline is not None and deadline <= time.time()

    async def submit(self, event: Event) -> VmRecord:
        """Asks for a transition and waits until the VM is there.

        Returns:
            The record after it; for a VM that was there already, the record as it is.

        Raises:
            RequestError: The transition is not possible; nothing changed.
            MicrovmError: It was tried and failed; the record says where the VM is now.

        Cancellation: ends the wait; what was asked for goes on.
        """
        await self._ask(event)
        return self.record

    async def rest_if_overdue(self) -> None:
        """Hibernates the VM if it is past its idle time, and if nobody comes to use it first."""
        if self.overdue:
            await self._ask(Idle(self._idle.activity, SuspendMode.HIBERNATE))

    @contextlib.asynccontextmanager
    async def use(self) -> AsyncGenerator[Live]:
        """A running guest for the time of a call, woken if need be; it is not put to rest inside the block.

        Raises:
            RequestError: The VM is stopped or failed, or was destroyed under the call (`not_found`).
            MicrovmError: It could not be woken.
        """
        await self._ask(Use())
        try:
            live = self.effects.live
            if live is None:
                raise GuestError("guest_unreachable", "The VM's VMM ended just now; vm_status says why.")
            try:
                yield live
            except GuestError as error:
                if error.code == "guest_unreachable" and self.record.state is VmState.DESTROYING:
                    raise _no_such_vm() from error
                cause = await live.explain(error)
                if cause is error:
                    raise
                raise cause from error
        finally:
            self._note(idle.Left())

    def jobs_changed(self) -> None:
        """Tells that a job began or ended, or that what it left behind did."""
        self._bell.set()

    def begin_drain(self) -> None:
        """From now on the VM can only be saved or destroyed: whoever wants more is refused."""
        self._draining = True
        self._bell.set()

    def _note(self, event: idle.Event) -> None:
        self._idle, _ = idle.decide(self._idle, event, time.time())
        self._bell.set()

    def vmm_died(self, reason: str) -> None:
        """Tells that the VMM ended; while an effect runs, the effect sees that itself."""
        self._queue.insert(0, _Request(VmmDied(reason)))
        self._bell.set()

    def out_of_space(self) -> None:
        """Tells that the VMM stopped the vCPUs because the volume is full."""
        self._queue.insert(0, _Request(OutOfSpace()))
        self._bell.set()

    def low_on_space(self) -> None:
        """Tells that the volume is nearly full; a VM that is changing is looked at again next time."""
        if not self.busy and self.record.state is VmState.RUNNING:
            self._queue.insert(0, _Request(lifecycle.LowSpace()))
            self._bell.set()

    async def _ask(self, event: Event) -> None:
        request = self._join(event)
        try:
            await request.answered.wait()
        except trio.Cancelled:
            if isinstance(event, Use):
                self._abandon(request)
            raise
        if request.error is not None:
            raise request.error

    def _join(self, event: Event) -> _Request:
        if self.gone.is_set():
            raise _no_such_vm()
        if self._buried is not None:
            raise self._buried
        if isinstance(event, _JOINABLE):
            for pending in self._queue:
                if pending.event == event:
                    return pending
        request = _Request(event)
        if isinstance(event, Destroy):
            self._queue.insert(0, request)
        else:
            self._queue.append(request)
        self._bell.set()
        return request

    def _abandon(self, request: _Request) -> None:
        if request.granted:
            self._note(idle.Left())
        elif request in self._queue:
            self._queue.remove(request)  # a wake that it caused goes on
        self._bell.set()

    # ---- the task ----

    async def serve(self, *, create_intent: int | None = None) -> None:
        """Runs until the VM is gone.

        Args:
            create_intent: The committed intent to make the VM, which is then the first effect.

        Cancellation: kills the VMM if there is one; the store then says what recovery needs.
        """
        async with trio.open_nursery() as nursery:
            self.effects.attach(nursery, died=self.vmm_died, out_of_space=self.out_of_space)
            if create_intent is not None:
                self._create_intent = create_intent
                self._start(nursery, Step(VmState.CREATING, lifecycle.CREATE), None)
            while not self.gone.is_set():
                self._bell = trio.Event()
                self._turn(nursery)
                with trio.move_on_at(self._wait_until()):
                    await self._bell.wait()
            nursery.cancel_scope.cancel(reason="the VM is gone")

    def _turn(self, nursery: trio.Nursery) -> None:
        """Decides all that can be decided now; starts at most one effect."""
        self._idle, _ = idle.decide(self._idle, idle.Jobs(self.effects.jobs.active), time.time())
        self._preempt()
        if self.busy:
            return
        for request in list(self._queue):
            answer = self._decide(request.event)
            if answer is LATER:
                break  # in order: what came later waits behind it
            if isinstance(answer, Step):
                self._start(nursery, answer, request)
                return
            self._answer(request, self._refused(answer))
        _, effects = idle.decide(self._idle, idle.Fired(self._idle.activity), time.time())
        if effects and isinstance(effects[0], idle.PutToRest):
            answer = self._decide(Idle(effects[0].seen, effects[0].mode))
            if isinstance(answer, Step):
                self._start(nursery, answer, None)

    def _preempt(self) -> None:
        """A destroy does not wait for the effect under way."""
        if self._effect_scope is None or self.record.state is VmState.DESTROYING:
            return
        if any(isinstance(request.event, Destroy) for request in self._queue):
            self.effects.kill()
            self._effect_scope.cancel(reason="the VM is being destroyed")

    def _decide(self, event: Event, before: VmState | None = None) -> Answer:
        record = self.record
        facts = lifecycle.Facts(
            state=record.state,
            before=before,
            active_jobs=self.effects.jobs.active,
            uses=self._idle.uses,
            activity=self._idle.activity,
            checkpoint=record.checkpoint_generation > record.spent_generation and not self._unfit,
            reason=record.reason,
            draining=self._draining,
        )
        return lifecycle.decide(facts, event)

    def _answer(self, request: _Request, error: MicrovmError | None) -> None:
        """Takes a request off the queue and answers it; a granted use is counted in the same step."""
        self._queue.remove(request)
        request.error = error
        if error is None and isinstance(request.event, Use):
            self._note(idle.Entered())
            request.granted = True
        request.answered.set()

    def _wait_until(self) -> float:
        """When the loop must look again though nothing rang, on Trio's clock."""
        deadline = self.hibernates_at
        return math.inf if deadline is None else trio.current_time() + max(deadline - time.time(), 0.0)

    # ---- one effect after another ----

    def _start(self, nursery: trio.Nursery, step: Step, cause: _Request | None) -> None:
        self._effect_scope = trio.CancelScope()
        nursery.start_soon(self._run, step, cause)

    async def _run(self, step: Step, cause: _Request | None) -> None:
        """Runs `step` and what follows from it, then lets the queue go on."""
        assert self._effect_scope is not None
        error: MicrovmError | None = None
        with self._effect_scope:
            try:
                error = await self._run_steps(step)
            except* MicrovmError as group:  # only the journal raises here
                error = first_error(group)
                if self.record.state not in lifecycle.SETTLED | {VmState.DESTROYING}:
                    await self._fail_after_crash(f"its state could not be written down: {error.message}")
            except* Exception as group:  # noqa: BLE001 - the top of one VM: its crash ends this VM only
                log.exception("driver crashed", extra={"vm_id": self.record.vm_id}, exc_info=group)
                error = MicrovmError("internal", "The service failed while changing this VM; see its log.")
                await self._fail_after_crash("the service failed while changing this VM")
        self._effect_scope = None
        if error is not None:
            self._answer_same(cause, error)
            if cause is None and self.record.state is VmState.RUNNING:
                self._note(idle.Woke())  # it could not be put to rest: its idle time begins anew
        elif cause is not None and lifecycle.is_fulfilled(cause.event, self.record.state):
            self._answer_same(cause, None)
        self._bell.set()

    async def _run_steps(self, step: Step) -> MicrovmError | None:
        """Commits, acts, decides what follows; returns the failure that the caller is told of."""
        error: MicrovmError | None = None
        following: Step | None = step
        while following is not None:
            following, failure = await self._run_step(following)
            error = error or failure
        return error

    async def _run_step(self, step: Step) -> tuple[Step | None, MicrovmError | None]:
        effect, before = step.effect, self.record.state
        if effect is None:
            await self._settle(step, before)
            return None, None
        begun = self.record if effect.settles_after else self._moved(step)
        intent = await self._begin(effect, begun)
        self._publish(begun)
        failure: MicrovmError | None = None
        completion: Event
        try:
            changes = await self.effects.run(effect, _Turn(self, intent, before))
            self.record = self.record.with_(**changes)
            completion = Done()
            self._unfit = False
        except EffectError as failed:
            failure = failed.error
            self._unfit = failure.code == "checkpoint_mismatch"
            if effect is lifecycle.CREATE:
                self._create_error = failure
            self.record = self.record.with_(**failed.changes)
            completion = Failed(failure.message, committed=failed.committed, guest_lost=failed.guest_lost)
        if isinstance(completion, Done) and effect.settles_after:
            answer: Answer = Step(step.state, reason=step.reason)
        elif isinstance(completion, Done) and effect is lifecycle.RELEASE:
            answer = STAY
        else:
            answer = self._decide(completion, before)
        return await self._finish(intent, answer, failure)

    async def _begin(self, effect: Effect, begun: VmRecord) -> int | None:
        """The effect's committed intent; what was lost is given back even if that cannot be written down."""
        if effect is lifecycle.CREATE:
            assert self._create_intent is not None
            return self._create_intent  # committed with the receipt and the row
        try:
            return await self._journal.intent(begun, effect.name)
        except MicrovmError as error:
            if effect is not lifecycle.RELEASE:
                raise
            self._log_unwritten(error)
            return None

    async def _finish(
        self, intent: int | None, answer: Answer, failure: MicrovmError | None
    ) -> tuple[Step | None, MicrovmError | None]:
        """Writes an effect's end down.

        Where that fails the VM is what it is nevertheless: the store says less than the truth until the next
        commit, and recovery makes of less what it makes of a crash. Only a creation is taken back: its VM
        would be removed by recovery whatever was done in it.
        """
        if isinstance(answer, Step) and answer.gone:
            assert intent is not None
            await self._journal.gone(intent, self.record)
            self._leave()
            return None, failure
        ends = isinstance(answer, Step) and answer.effect is None
        settled = self._moved(answer) if isinstance(answer, Step) and ends else self.record
        outcome = "done" if failure is None else f"failed: {failure.message}"
        try:
            if intent is not None:
                await self._journal.done(intent, settled, outcome)
        except MicrovmError as error:
            self._log_unwritten(error)
            failure = failure or error
            if ends and self.record.state is VmState.CREATING:
                self._create_error = error
                return self._remove_step(error), failure
        if ends:
            self._publish(settled)
            return None, failure
        return (answer if isinstance(answer, Step) else None), failure

    def _remove_step(self, error: MicrovmError) -> Step | None:
        answer = self._decide(Failed(error.message))
        return answer if isinstance(answer, Step) else None

    async def _settle(self, step: Step, before: VmState) -> None:
        """A transition without an effect, committed as one; it is true even if it cannot be written down."""
        settled = self._moved(step)
        try:
            intent = await self._journal.intent(settled, f"{before}→{step.state}")
            await self._journal.done(intent, settled, "done")
        except MicrovmError as error:
            self._log_unwritten(error)
        self._publish(settled)

    def _log_unwritten(self, error: MicrovmError) -> None:
        log.error("not written down", extra={"vm_id": self.record.vm_id, "why": error.message})

    def _moved(self, step: Step) -> VmRecord:
        now = time.time()
        changed = step.state is not self.record.state
        return self.record.with_(
            state=step.state,
            since=now if changed else self.record.since,
            reason=step.reason,
            slot=self.effects.slot if self.effects.live is not None else self.record.slot,
            transitions_total=self.record.transitions_total + changed,
            last_activity_at=self._idle.last_activity_at,
        )

    async def commit_step(self, intent: int, step: str, changes: dict[str, Any]) -> None:
        """For the effect under way: writes a point of no return and its changes as one commit."""
        await self._journal.step(intent, self.record.with_(**changes), step)
        self._publish(self.record.with_(**changes))

    def _publish(self, record: VmRecord) -> None:
        self.record = record
        self.changed()
        awake = record.state is VmState.RUNNING
        if awake != self._idle.awake:
            self._note(idle.Woke() if awake else idle.Rested())

    async def bury(self, reason: str) -> None:
        """After the driver itself crashed: ends the VMM, fails the VM and answers everybody. Never raises."""
        self._effect_scope = None
        await self._fail_after_crash(reason)
        error = MicrovmError("internal", f"This VM has no driver any more: {reason}. Restart the service.")
        for request in list(self._queue):
            self._answer(request, error)
        self._buried = error

    async def _fail_after_crash(self, reason: str) -> None:
        with contextlib.suppress(MicrovmError):
            await self.effects.release()
        if self.record.state is not VmState.DESTROYING:
            self.effects.jobs.lose_active(reason)
            await self._settle(Step(VmState.FAILED, reason=reason), self.record.state)

    def _answer_same(self, cause: _Request | None, error: MicrovmError | None) -> None:
        """Who caused the effect, or waits for the very same, gets its outcome; others are decided anew."""
        for request in list(self._queue):
            same = cause is not None and (request is cause or request.event == cause.event)
            if same and request in self._queue:
                self._answer(request, error)

    def _leave(self) -> None:
        self.gone.set()
        missing = self._create_error or _no_such_vm()
        for request in list(self._queue):
            self._answer(request, None if isinstance(request.event, Destroy | Drain) else missing)
        self._bell.set()

    def _refused(self, answer: Answer) -> MicrovmError | None:
        """A refusal as the error that it is told as; a failed VM's has the last words of its VMM."""
        if not isinstance(answer, Refusal):
            return None
        if answer.code == "draining":
            return CapacityError(answer.code, answer.message, retry_after_s=DRAINING_RETRY_S)
        death = self.effects.death if answer.code == "vm_failed" else None
        return RequestError(answer.code, answer.message, None if death is None else death.detail)


def _no_such_vm() -> RequestError:
    return RequestError("not_found", "There is no VM with this id.")
