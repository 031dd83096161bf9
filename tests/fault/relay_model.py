"""What a client may see of a script: worked out from the script, knowing nothing of how a gateway works.

A gateway has all of a script in front of it one read at a time; here it is known whole, with every event and its place.
Where more than one outcome is right, because nothing has reached the client yet or because it depends on how the bytes
fall into reads, all of them are named.
"""

import json
from dataclasses import dataclass

from tests.fault.relay_client import Ask, Seen
from tests.fault.relay_scripts import (
    BLAMES,
    DONE,
    FAILED,
    HEALTHY,
    HEALTHY_STREAM,
    TOO_LONG,
    USAGE,
    Ending,
    Framing,
    Script,
    crlf,
)

_STATUS = {
    "engine_lost": 502,
    "engine_died": 502,
    "engine_protocol_error": 502,
    "first_byte_timeout": 504,
    "idle_timeout": 504,
}
_PROTOCOL = frozenset({"engine_protocol_error"})
_SILENT = frozenset({"first_byte_timeout", "idle_timeout"})
_LOST = frozenset({"engine_lost", "engine_died"})
_DONE_LINES = tuple(line[:end] for line in (DONE, crlf(DONE)) for end in range(len(DONE) - 2, len(line)))
"""The end mark without all of its blank line."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Exactly this, and a proper end."""

    body: bytes
    status: int = 200
    kind: str = "text/event-stream"

    def fits(self, ask: Ask, seen: Seen) -> bool:
        kind = seen.headers.get("content-type", "")
        return seen.whole and (seen.status, seen.body) == (self.status, self.body) and kind == self.kind


@dataclass(frozen=True, slots=True)
class Broken:
    """A stream of just these events, one that says what went wrong, and a proper end."""

    events: bytes
    codes: frozenset[str]

    def fits(self, ask: Ask, seen: Seen) -> bool:
        error = seen.body.removeprefix(self.events)
        if not (seen.whole and seen.status == 200 and seen.body.startswith(self.events)):
            return False
        is_event = error.startswith(b"data: ") and error.endswith(b"\n\n") and error.count(b"\n") == 2
        return is_event and _is_error(ask, error.removeprefix(b"data: "), self.codes) is not None


@dataclass(frozen=True, slots=True)
class Refused:
    """No answer but an error, in the shape of the API, with the status that belongs to it."""

    codes: frozenset[str]

    def fits(self, ask: Ask, seen: Seen) -> bool:
        said = _is_error(ask, seen.body, self.codes) if seen.whole else None
        expected = {_STATUS[code] for code in self.codes} if said == "" else {_STATUS[said]} if said else set()
        return seen.status in expected and seen.headers.get("content-type") == "application/json"


@dataclass(frozen=True, slots=True)
class Cut:
    """Some of this, and the end of the connection: nobody can take it for whole."""

    body: bytes
    statuses: frozenset[int] = frozenset({200})

    def fits(self, ask: Ask, seen: Seen) -> bool:
        return not seen.whole and seen.status in {0, *self.statuses} and self.body.startswith(seen.body)


Outcome = Answer | Broken | Refused | Cut


def _is_error(ask: Ask, text: bytes, codes: frozenset[str]) -> str | None:
    """The code of an error in the shape of the API, "" for an API whose errors have none; None if it is no such
    error."""
    try:
        said = json.loads(text)
    except ValueError:
        return None
    error = said.get("error") if isinstance(said, dict) and len(said) == 1 else None
    if ask.api.kserve:
        return "" if isinstance(error, str) and error else None
    if not isinstance(error, dict) or set(error) != {"message", "type", "param", "code"} or not error["message"]:
        return None
    return error["code"] if error["code"] in codes and error["type"] == "server_error" else None


def outcomes(script: Script, ask: Ask) -> tuple[Outcome, ...]:
    """What the client may see when the endpoint asked first does as `script` says."""
    elsewhere = _healthy(ask) if ask.elsewhere else ()
    codes = _SILENT if script.ending is Ending.WAIT else _LOST
    if script.garbage and not script.garbage_at:
        return (Refused(_PROTOCOL),)
    if len(script.sent) < len(script.head):
        if script.ending is Ending.WAIT:
            return (Refused(frozenset({"first_byte_timeout"})),)
        return elsewhere or (Refused(frozenset({"engine_lost"})),)
    if script.garbage:
        codes = _PROTOCOL
    if not script.status.startswith("200"):
        return _of_error(script, ask, codes)
    return _of_stream(script, ask, codes) if script.events else _of_plain(script, codes)


def ends(script: Script) -> bool:
    """Whether the body's own framing says that it is complete."""
    if script.garbage or len(script.sent) < len(script.head):
        return False
    if script.framing is Framing.CHUNKED:
        return script.sent == script.wire
    return script.framing is Framing.LENGTH and len(script.delivered) >= script.announced


def leaves_nothing(script: Script) -> bool:
    """Whether the next response on the connection would be in its place."""
    return ends(script) and (script.framing is not Framing.LENGTH or script.length_off == 0)


def _healthy(ask: Ask) -> tuple[Outcome, ...]:
    script = HEALTHY_STREAM if ask.stream else HEALTHY
    return (Answer(script.body, kind=script.kind),)


def _of_stream(script: Script, ask: Ask, codes: frozenset[str]) -> tuple[Outcome, ...]:
    body = script.announced_part
    whole, left = [], body
    for event in script.parts:
        if not left.startswith(event):
            break
        whole.append(event)
        left = left[len(event) :]
    hides_usage = not (ask.usage or ask.api.kserve)
    shown = b"".join(event for event in whole if not (hides_usage and event in (USAGE, crlf(USAGE))))
    other = _healthy(ask) if ask.elsewhere and not ask.api.kserve else ()
    told_failed = other if whole and whole[0] in (FAILED, crlf(FAILED)) else ()
    if hides_usage and left.endswith(b"\n") and left.rstrip() == USAGE.rstrip():
        left = b""  # its blank line is missing
    said_done = left in _DONE_LINES or (not left and whole[-1:] in ([DONE], [crlf(DONE)]))
    if ends(script):
        if left and not left.endswith(b"\n") and not said_done:
            return (Broken(shown, _PROTOCOL), *told_failed)
        return (Answer(shown + left), *told_failed)
    if said_done:
        return (Answer(shown + left), *told_failed)
    if len(script.sent) == len(script.head) and not ask.api.kserve:  # engines send that before they begin
        if script.ending is Ending.WAIT:
            return (Refused(frozenset({"first_byte_timeout"})),)
        return other or (Refused(frozenset({"engine_lost"})),)
    broken = Broken(shown, codes)
    if shown:
        return (broken, *told_failed)
    return (broken, Refused(codes), *(other if script.ending is not Ending.WAIT else ()), *told_failed)


def _of_plain(script: Script, codes: frozenset[str]) -> tuple[Outcome, ...]:
    body = script.announced_part
    if ends(script) or (script.framing is Framing.CLOSE and script.ending is Ending.CLOSE):
        return (Answer(body, kind=script.kind),)  # until close, nobody can tell whether it is all
    return (Cut(body), Refused(codes))


def _of_error(script: Script, ask: Ask, codes: frozenset[str]) -> tuple[Outcome, ...]:
    """An answer with an error's status passes on as it is, unless another endpoint may do better."""
    status = int(script.status[:3])
    busy = status in (429, 503) and not (ask.api.kserve and status == 429)
    elsewhere = _healthy(ask) if busy and ask.elsewhere else ()
    told = script.body == TOO_LONG and BLAMES in script.announced_part  # a length can leave out what it says
    if not ask.api.kserve and status == 500 and told:
        shown = {status, 400} if not ends(script) else {400}
    else:
        shown = {status}
    if ends(script) or (script.framing is Framing.CLOSE and script.ending is Ending.CLOSE):
        return elsewhere or tuple(Answer(script.announced_part, one, script.kind) for one in sorted(shown))
    if elsewhere and not ask.api.kserve:
        return elsewhere  # the status has said enough
    return (Cut(script.delivered, frozenset(shown)), Refused(codes))
