"""The mirror of a list and its watches, held to a model of the API server's promises."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k8s.mirror import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    SILENCE_S,
    STALE_AFTER_S,
    WATCH_S,
    ListPage,
    Mirror,
    Pause,
    Watch,
)
from k8s.objects import Pod
from tests.kubernetes_objects import pod_json

State = dict[str, str]
"""Names of the pods there are, and their addresses."""


def mirror() -> Mirror[Pod]:
    return Mirror(Pod, now=0.0, chance=lambda: 0.5)


def page(state: State, version: int, token: str | None = None) -> bytes:
    items = [pod_json(name, ip=ip) for name, ip in state.items()]
    metadata = {"resourceVersion": str(version), **({"continue": token} if token else {})}
    return json.dumps({"kind": "PodList", "metadata": metadata, "items": items}).encode()


def line(type_: str, name: str, ip: str, version: int) -> bytes:
    return json.dumps({"type": type_, "object": pod_json(name, ip=ip, resource_version=str(version))}).encode()


def bookmark(version: int) -> bytes:
    object_ = {"kind": "Pod", "metadata": {"resourceVersion": str(version), "creationTimestamp": None}, "spec": {}}
    return json.dumps({"type": "BOOKMARK", "object": object_}).encode()


def error(code: int) -> bytes:
    object_ = {"kind": "Status", "status": "Failure", "code": code, "reason": "Some", "message": f"told {code}"}
    return json.dumps({"type": "ERROR", "object": object_}).encode()


def seen(one: Mirror[Pod]) -> State:
    return {pod.metadata.name: pod.status.pod_ip or "" for pod in one.objects.values()}


def watching(state: State, version: int = 7) -> Mirror[Pod]:
    one = mirror()
    one.next()
    one.page(page(state, version), 0.0)
    assert isinstance(one.next(), Watch)
    one.watch_opened(0.0)
    return one


def test_a_list_then_a_watch_from_its_version() -> None:
    one = mirror()
    assert one.next() == ListPage(None)
    one.page(page({"a": "1"}, 7, "more"), 1.0)
    assert one.next() == ListPage("more")
    assert seen(one) == {}, "a part of a list says nothing of what is not there"
    one.page(page({"b": "2"}, 7), 1.0)
    assert one.synced
    step = one.next()
    assert isinstance(step, Watch)
    assert step.resource_version == "7"
    assert WATCH_S <= step.timeout_s < SILENCE_S
    assert seen(one) == {"a": "1", "b": "2"}


def test_an_empty_list_may_come_as_null() -> None:
    one = mirror()
    one.page(b'{"metadata": {"resourceVersion": "7"}, "items": null}', 0.0)
    assert one.synced
    assert isinstance(one.next(), Watch)


def test_a_watch_that_ended_is_resumed_where_it_was() -> None:
    one = watching({"a": "1"})
    assert one.event(line("MODIFIED", "a", "2", 9), 1.0)
    one.watch_ended(1.0)
    step = one.next()
    assert isinstance(step, Watch)
    assert step.resource_version == "9"
    one.watch_opened(1.0)
    assert one.event(bookmark(20), 2.0)
    one.watch_ended(2.0)
    step = one.next()
    assert isinstance(step, Watch)
    assert step.resource_version == "20"
    assert seen(one) == {"a": "2"}


@pytest.mark.parametrize("how", ["status", "event"])
def test_gone_means_a_new_list_and_what_is_not_in_it_was_deleted(how: str) -> None:
    one = watching({"a": "1", "b": "1"})
    assert one.event(line("MODIFIED", "a", "2", 9), 1.0)
    if how == "event":
        assert not one.event(error(410), 1.0)
    else:
        one.failed(410, "too old")
    assert one.next() == ListPage(None)
    assert seen(one) == {"a": "2", "b": "1"}, "until the list is here, what was known counts"
    revision = one.revision
    one.page(page({"a": "2"}, 30), 2.0)
    assert seen(one) == {"a": "2"}
    assert one.revision > revision


def test_gone_again_and_again_is_paused_for_longer_and_longer() -> None:
    one = watching({})
    pauses = []
    for _ in range(12):
        one.failed(410, "too old")
        step = one.next()
        assert isinstance(step, Pause)
        pauses.append(step.seconds)
        assert one.next() == ListPage(None)
        one.page(page({}, 7), 0.0)
        one.next()
        one.watch_opened(0.0)
    assert pauses == sorted(pauses)
    assert pauses[0] == 0.75 * FIRST_PAUSE_S
    assert pauses[-1] == 0.75 * LONGEST_PAUSE_S


def test_other_errors_keep_the_objects_and_the_version() -> None:
    one = watching({"a": "1"})
    assert not one.event(error(500), 1.0)
    assert isinstance(one.next(), Pause)
    assert isinstance(one.next(), Watch)
    one.failed(403, "pods is forbidden")
    assert one.error == "pods is forbidden"
    assert isinstance(one.next(), Pause)
    step = one.next()
    assert isinstance(step, Watch)
    assert step.resource_version == "7"
    assert seen(one) == {"a": "1"}
    one.watch_opened(1.0)
    assert one.error is None


def test_a_watch_that_is_closed_at_once_is_not_opened_at_once_again() -> None:
    one = watching({})
    one.watch_ended(0.01)
    assert isinstance(one.next(), Pause)
    one.next()
    one.watch_opened(0.1)
    one.watch_ended(30.0)
    assert isinstance(one.next(), Watch), "one that lasted may have had nothing to tell"


def test_a_token_that_expired_begins_the_list_again() -> None:
    one = mirror()
    one.page(page({"a": "1"}, 7, "more"), 0.0)
    one.failed(410, "the continue token is too old")
    assert isinstance(one.next(), Pause)
    assert one.next() == ListPage(None)
    one.page(page({"b": "1"}, 9), 0.0)
    assert seen(one) == {"b": "1"}


def test_what_cannot_be_read_harms_nothing_else_and_is_told() -> None:
    one = mirror()
    good = json.loads(page({"a": "1"}, 7))
    good["items"].append({"metadata": {"name": "b"}, "spec": {"containers": 3}})
    one.page(json.dumps(good).encode(), 0.0)
    assert seen(one) == {"a": "1"}
    assert one.unreadable is not None
    one.watch_opened(0.0)
    bad = {"type": "MODIFIED", "object": {"metadata": {"name": "a", "resourceVersion": "9"}, "status": 3}}
    assert one.event(json.dumps(bad).encode(), 0.0)
    assert one.resource_version == "9"
    assert not one.event(b"{", 0.0)
    assert not one.event(b'{"type": "SOMETHING", "object": {}}', 0.0)
    assert seen(one) == {"a": "1"}


def test_news_that_changes_nothing_that_counts_moves_no_revision() -> None:
    one = watching({"a": "1"})
    revision = one.revision
    assert one.event(line("MODIFIED", "a", "1", 12), 1.0)
    assert one.event(line("DELETED", "zzz", "1", 13), 1.0)
    assert one.event(bookmark(14), 1.0)
    assert one.revision == revision
    assert one.event(line("MODIFIED", "a", "2", 15), 1.0)
    assert one.revision == revision + 1


def test_staleness_shows_when_the_server_is_away_and_when_a_watch_is_dead() -> None:
    one = watching({"a": "1"})
    assert one.stale_since(SILENCE_S - 1) is None
    assert one.stale_since(SILENCE_S + 1) == 0.0
    one.event(bookmark(9), 50.0)
    assert one.stale_since(50 + SILENCE_S - 1) is None
    one.watch_ended(60.0)
    one.failed(None, "connection refused")
    assert one.stale_since(50 + STALE_AFTER_S + 1) == 50.0
    one.watch_opened(80.0)
    assert one.stale_since(81.0) is None
    assert mirror().stale_since(STALE_AFTER_S + 1) == 0.0, "one that never listed knows nothing"


@dataclass
class ApiServer:
    """A model of one: every state it was ever in, by its resourceVersion; versions before `oldest` are compacted."""

    states: list[State] = field(default_factory=lambda: [{}])
    events: list[tuple[str, str, str]] = field(default_factory=lambda: [("", "", "")])
    oldest: int = 0

    @property
    def now(self) -> int:
        return len(self.states) - 1

    def set(self, name: str, ip: str | None) -> None:
        state = dict(self.states[-1])
        if ip is None:
            if name not in state:
                return
            self.events.append(("DELETED", name, state.pop(name)))
        else:
            self.events.append(("MODIFIED" if name in state else "ADDED", name, ip))
            state[name] = ip
        self.states.append(state)


class Driver:
    """Does a mirror's steps against the model, one at a time."""

    def __init__(self, server: ApiServer, draw: Callable[[int], int]) -> None:
        self.server, self.draw = server, draw
        self.mirror = mirror()
        self.time = 0.0
        self.at: int | None = None
        """Up to where the open watch has told."""

    def step(self, faults: bool) -> None:
        self.time += 0.01
        if self.at is not None:
            self._tell(faults)
            return
        step = self.mirror.next()
        if isinstance(step, Pause):
            assert 0 < step.seconds <= LONGEST_PAUSE_S
            self.time += step.seconds
        elif faults and self.draw(6) == 0:
            self.mirror.failed((None, 500, 403, 410)[self.draw(4)], "a fault")
        elif isinstance(step, ListPage):
            self._list(step)
        elif int(step.resource_version) < self.server.oldest:
            self.mirror.failed(410, "too old resource version")
        else:
            self.at = int(step.resource_version)
            self.mirror.watch_opened(self.time)

    def _list(self, step: ListPage) -> None:
        version, first = (self.server.now, 0) if step.token is None else map(int, step.token.split("/"))
        if version < self.server.oldest:
            self.mirror.failed(410, "the continue token is too old")
            return
        items = sorted(self.server.states[version].items())
        part, more = items[first : first + 2], first + 2 < len(items)
        self.mirror.page(page(dict(part), version, f"{version}/{first + 2}" if more else None), self.time)

    def _tell(self, faults: bool) -> None:
        assert self.at is not None
        fault = self.draw(12) if faults else 99
        if fault == 0:
            self.at = None
            self.mirror.watch_ended(self.time)
        elif fault == 1:
            self.at = None
            assert not self.mirror.event(error((410, 500, 504)[self.draw(3)]), self.time)
        elif self.at == self.server.now:
            assert self.mirror.event(bookmark(self.at), self.time)
        else:
            self.at += 1
            told = line(*self.server.events[self.at], self.at)
            for _ in range(2 if fault == 2 else 1):
                assert self.mirror.event(told, self.time)


changes = st.tuples(st.sampled_from(["a", "b", "c", "d", "e"]), st.none() | st.sampled_from(["1", "2"]))


@settings(max_examples=200)
@given(st.data(), st.lists(st.one_of(st.just("step"), st.just("step"), st.just("compact"), changes), max_size=80))
def test_whatever_happens_the_mirror_shows_a_state_that_was_and_in_the_end_the_one_that_is(
    data: st.DataObject, moves: list[Any]
) -> None:
    server = ApiServer()
    driver = Driver(server, lambda below: data.draw(st.integers(0, below - 1)))
    for move in moves:
        if move == "step":
            driver.step(faults=True)
        elif move == "compact":
            server.oldest = server.now
        else:
            server.set(*move)
        version = driver.mirror.resource_version
        if version is not None:
            assert seen(driver.mirror) == server.states[int(version)]
    for _ in range(4 * len(moves) + 20):
        driver.step(faults=False)
    assert driver.mirror.resource_version == str(server.now)
    assert seen(driver.mirror) == server.states[-1]
    assert driver.mirror.stale_since(driver.time) is None
    assert driver.mirror.error is None


def test_objects_take_little_memory_whatever_the_server_sends_with_them() -> None:
    big = pod_json("a")
    big["metadata"]["managedFields"] = [{"fieldsV1": {"f:status": {"x" * 50: {}}}}] * 100
    kept = msgspec.json.encode(msgspec.json.decode(json.dumps(big).encode(), type=Pod))
    assert len(kept) < len(json.dumps(big)) / 10
