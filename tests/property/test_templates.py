"""Every waiter is answered exactly once, and no template is built twice at once or destroyed under a copy."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from microvm.policy import templates
from microvm.policy.templates import Building, Ready, Templates

_KEYS = st.sampled_from(["k", "l"])
_OPS = st.lists(
    st.tuples(
        st.sampled_from(["want", "want", "want", "leave", "built", "failed", "done", "retire", "drain"]),
        _KEYS,
        st.integers(0, 9),
    ),
    max_size=60,
)


class World:
    """What there would be on the host after the effects; asserts that each effect makes sense there."""

    def __init__(self) -> None:
        self.building: set[str] = set()
        self.whole: set[str] = set()
        self.copying: dict[str, int] = {"k": 0, "l": 0}
        self.waiting: dict[int, str] = {}

    def run(self, effects: tuple[templates.Effect, ...]) -> None:
        for effect in effects:
            match effect:
                case templates.Build(key):
                    assert key not in self.building | self.whole
                    self.building.add(key)
                case templates.CancelBuild(key):
                    assert key in self.building
                case templates.Grant(key, waiter):
                    assert key in self.whole
                    assert self.waiting.pop(waiter) == key
                    self.copying[key] += 1
                case templates.Deny(waiter):
                    del self.waiting[waiter]
                case templates.Destroy(key):
                    assert self.copying[key] == 0
                    self.whole.remove(key)


@given(_OPS)
def test_templates_answer_every_waiter_once(ops: list[tuple[str, str, int]]) -> None:
    world = World()
    ledger = Templates()
    for number, (op, key, choice) in enumerate(ops):
        event = _event(world, op, key, number, choice)
        if event is None:
            continue
        ledger, effects = templates.decide(ledger, event, float(number))
        world.run(effects)
        _agree(ledger, world)
    # what goes on comes to an end, and then nobody is left waiting
    for number in range(len(ops), len(ops) + 200):
        event = _finishing(world)
        if event is None:
            break
        ledger, effects = templates.decide(ledger, event, float(number))
        world.run(effects)
        _agree(ledger, world)
    assert not world.waiting
    assert not world.building


def _event(world: World, op: str, key: str, number: int, choice: int) -> templates.Event | None:
    match op:
        case "want":
            world.waiting[number] = key
            return templates.Want(key, number)
        case "leave" if world.waiting:
            waiter = sorted(world.waiting)[choice % len(world.waiting)]
            return templates.Leave(world.waiting.pop(waiter), waiter)
        case "built" if key in world.building:
            return _built(world, key)
        case "failed" if key in world.building:
            world.building.remove(key)
            return templates.BuildFailed(key, "reason")
        case "done" if world.copying[key]:
            world.copying[key] -= 1
            return templates.Done(key)
        case "retire":
            return templates.Retire(key)
        case "drain" if choice == 0:
            return templates.Drain()
        case _:
            return None


def _finishing(world: World) -> templates.Event | None:
    for key in sorted(world.building):
        return _built(world, key)
    for key, copies in world.copying.items():
        if copies:
            world.copying[key] -= 1
            return templates.Done(key)
    return None


def _built(world: World, key: str) -> templates.Event:
    world.building.remove(key)
    world.whole.add(key)
    return templates.Built(key)


def _agree(ledger: Templates, world: World) -> None:
    assert {key for key, entry in ledger.entries.items() if isinstance(entry, Building)} == world.building
    ready = {key: entry for key, entry in ledger.entries.items() if isinstance(entry, Ready)}
    assert ready.keys() == world.whole
    assert all(entry.users == world.copying[key] for key, entry in ready.items())
