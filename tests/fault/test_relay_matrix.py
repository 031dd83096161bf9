"""Every fault of an engine, in every API, streamed or not, for old and new clients, with and without another endpoint.

What a client may see is worked out by a model of its own (`relay_model`). For every request: it saw one of those
outcomes and nothing else, the engine was hung up on if it was given up, and the next request, on the same connections
where they last, got its answer. Once all are through, every counter is back at zero.
"""

import itertools
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fault.relay_client import PLAIN_ONES, STREAMS, Api, Ask
from tests.fault.relay_matrix import Matrix, running_matrix
from tests.fault.relay_scripts import (
    BROKEN,
    CHUNK_GARBAGE,
    COMMENT,
    CONTENT,
    DONE,
    FAILED,
    FINISH,
    HEAD_GARBAGE,
    LONG,
    NULL_USAGE,
    PLAIN,
    REFUSED,
    TEXT,
    TOO_LONG,
    TOOL,
    USAGE,
    UTF8,
    Ending,
    Framing,
    Script,
    crlf,
)

EXAMPLES = int(os.environ.get("RELAY_EXAMPLES", "500"))
"""Generated combinations; 5,000 take some minutes."""
CUT_OFF = (Ending.CLOSE, Ending.RESET)
STREAM = Script((TEXT, UTF8, TOOL, FINISH, USAGE, DONE), events=True)
SHORT = Script((UTF8, crlf(TEXT), DONE), events=True)
PLAINLY = Script((PLAIN[:20], PLAIN[20:]), events=False)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def matrix() -> AsyncIterator[Matrix]:
    async with running_matrix() as matrix:
        yield matrix


def asks(script: Script) -> Iterator[Ask]:
    """Every request that the script may be an answer to."""
    for version, elsewhere in itertools.product(("1.0", "1.1"), (False, True)):
        if script.events or not script.status.startswith("200"):
            for api, usage in itertools.product(STREAMS, (False, True)):
                if not (usage and api.kserve):
                    yield Ask(api, True, version, elsewhere, usage)
        if not script.events:
            for api in PLAIN_ONES:
                yield Ask(api, False, version, elsewhere)


def both_kinds(**faults: object) -> list[Script]:
    return [replace(script, **faults) for script in (STREAM, PLAINLY)]  # type: ignore[arg-type]


def at(script: Script, mark: bytes, ending: Ending, behind: int = 0) -> Script:
    """The script stopped at `mark`, or so many bytes behind its beginning."""
    return replace(script, stop=script.wire.index(mark) + behind, ending=ending)


def deaths(stopped: str, ending: Ending) -> list[Script]:
    """The scripts of both kinds that end in this place."""
    if stopped == "before the head":
        return [replace(script, stop=0, ending=ending) for script in (STREAM, PLAINLY)]
    if stopped == "within the head":
        return [at(script, b"content-type", ending, 5) for script in (STREAM, PLAINLY)]
    if stopped == "behind the head":
        return [replace(script, stop=len(script.head), ending=ending) for script in (STREAM, PLAINLY)]
    if stopped == "within a chunk size":
        return [at(STREAM, b"\r\n" + UTF8, ending, 1), at(PLAINLY, b"\r\n" + PLAIN[20:], ending, 1)]
    if stopped == "within an event":
        return [at(STREAM, b"tool_calls", ending), replace(at(STREAM, b"tool_calls", ending), chunk=7)]
    if stopped == "between the line ends":
        return [at(STREAM, UTF8, ending, len(UTF8) - 1), at(SHORT, crlf(TEXT), ending, len(crlf(TEXT)) - 1)]
    if stopped == "within a character":
        return [at(STREAM, b"\x9f\x99\x82", ending, 1), at(PLAINLY, b"\x9f\x99\x82", ending, 1)]
    if stopped == "between events":
        return [at(STREAM, TOOL, ending, len(TOOL)), at(STREAM, TOOL, ending, len(TOOL) + 2)]
    if stopped == "behind the end mark":
        return [at(STREAM, DONE, ending, behind) for behind in (12, 13, 14, 16)]
    if stopped == "before the last chunk":
        return [replace(script, stop=len(script.wire) - 5, ending=ending) for script in (STREAM, PLAINLY)]
    assert stopped == "within the last chunk"
    return [replace(script, stop=len(script.wire) - 2, ending=ending) for script in (STREAM, PLAINLY)]


PLACES = (
    "before the head",
    "within the head",
    "behind the head",
    "within a chunk size",
    "within an event",
    "between the line ends",
    "within a character",
    "between events",
    "behind the end mark",
    "before the last chunk",
    "within the last chunk",
)


@pytest.mark.parametrize("ending", Ending)
@pytest.mark.parametrize("stopped", PLACES)
async def test_an_engine_that_stops_in_the_middle(matrix: Matrix, stopped: str, ending: Ending) -> None:
    assert await matrix.check_all((script, ask) for script in deaths(stopped, ending) for ask in asks(script))


def grouped(parts: tuple[bytes, ...], *counts: int) -> Script:
    """So many events in each chunk."""
    ends = itertools.accumulate(counts)
    sizes = tuple(len(b"".join(parts[end - count : end])) for count, end in zip(counts, ends, strict=True))
    return Script(parts, events=True, chunk=sizes)


def across(event: bytes, offset: int, *, gone: bool = False) -> Script:
    """A stream with `event` in two chunks of one read, which ends with it; then the rest, or the engine is gone."""
    sizes = (len(TEXT), len(TEXT), offset, len(event) - offset, len(TEXT))
    script = Script((TEXT, TEXT, event, TEXT), events=True, chunk=sizes)
    end = len(replace(script, parts=script.parts[:3]).wire) - len(b"0\r\n\r\n")
    start = script.wire.index(TEXT) + len(TEXT + b"\r\n")
    return replace(script, cuts=(start, end), stop=end if gone else None, ending=Ending.RESET if gone else Ending.WAIT)


SOUND = {
    "one event a chunk": both_kinds(),
    "all in one chunk": both_kinds(chunk=-1),
    "a byte a chunk": both_kinds(chunk=1),
    "chunks across events": both_kinds(chunk=50),
    "chunk extensions": both_kinds(extension=b';name="value";other'),
    "trailers": both_kinds(trailer=b"x-trailer: 1\r\nserver-timing: 2\r\n"),
    "content-length": both_kinds(framing=Framing.LENGTH),
    "until close": both_kinds(framing=Framing.CLOSE, ending=Ending.CLOSE),
    "interim responses": both_kinds(interim=3),
    "closed behind the end": both_kinds(ending=Ending.CLOSE),
    "reset behind the end": both_kinds(ending=Ending.RESET),
    "drip": both_kinds(cuts=1),
    "drip, content-length": both_kinds(cuts=1, framing=Framing.LENGTH),
    "drip, until close": both_kinds(cuts=1, framing=Framing.CLOSE, ending=Ending.CLOSE),
    "drip, a byte a chunk": [replace(SHORT, chunk=1, cuts=1)],
    "usage shares a chunk with text": [grouped((TEXT, FINISH, USAGE, DONE), 1, 2, 1)],
    "usage shares a chunk with the end": [grouped((TEXT, USAGE, DONE), 1, 2)],
    "usage between comments": [grouped((TEXT, COMMENT, USAGE, COMMENT, DONE), 1, 3, 1)],
    "usage first": [Script((USAGE, TEXT, DONE), events=True)],
    "usage alone": [Script((USAGE, DONE), events=True)],
    "usage in chunks of some bytes": [replace(STREAM, chunk=size) for size in range(2, 40)],
    "usage across chunks of one read": [across(USAGE, offset) for offset in range(1, len(USAGE))],
    "the end mark across chunks of one read": [across(DONE, offset, gone=True) for offset in range(1, len(DONE))],
    "no usage in usage": [Script((NULL_USAGE, NULL_USAGE, USAGE, DONE), events=True)],
    "crlf": [Script(tuple(map(crlf, STREAM.parts)), events=True)],
    "crlf, a byte a chunk": [Script(tuple(map(crlf, STREAM.parts)), events=True, chunk=1)],
    "line ends mixed": [Script((TEXT, crlf(USAGE), UTF8, crlf(TOOL), USAGE, crlf(DONE)), events=True)],
    "comments": [Script((COMMENT, TEXT, COMMENT, COMMENT, UTF8, DONE), events=True)],
    "no end mark": [Script((TEXT, UTF8), events=True)],
    "no last blank line": [Script((TEXT, DONE[:-1]), events=True), Script((TEXT, DONE[:-2]), events=True)],
    "every content": [Script((*CONTENT, DONE), events=True), Script((*CONTENT, DONE), events=True, chunk=9)],
    "a long event": [Script((TEXT, LONG, DONE), events=True), Script((LONG, LONG), events=True, chunk=1000)],
    "an error within": [Script((TEXT, FAILED), events=True), Script((TEXT, FAILED, DONE), events=True)],
    "an error at once": [Script((FAILED, DONE), events=True), Script((crlf(FAILED),), events=True)],
    "a refusal at once": [Script((REFUSED, DONE), events=True)],
    "an error at once, in drips": [Script((FAILED, DONE), events=True, cuts=9)],
    "a refusal at once, in two reads": [Script((REFUSED, DONE), events=True, cuts=64)],
}


@pytest.mark.parametrize("case", SOUND)
async def test_an_answer_that_is_whole_however_it_is_framed(matrix: Matrix, case: str) -> None:
    assert await matrix.check_all((script, ask) for script in SOUND[case] for ask in asks(script))


LONGER = [
    replace(script, framing=Framing.LENGTH, length_off=off)
    for script in (STREAM, PLAINLY, SHORT)
    for off in (-1, -2, -5, -14, -16, -30)
]
MALFORMED = {
    "garbage instead of a head": [replace(PLAINLY, garbage=garbage) for garbage in HEAD_GARBAGE]
    + [replace(STREAM, garbage=garbage, ending=ending) for garbage in HEAD_GARBAGE for ending in Ending],
    "garbage instead of a chunk": [
        replace(script, garbage=garbage, garbage_at=place)
        for script in (STREAM, PLAINLY)
        for garbage in CHUNK_GARBAGE
        for place in (1, 2, 9)
    ],
    "garbage, then gone": [
        replace(script, garbage=b"zz\r\n", garbage_at=2, ending=ending)
        for script in (STREAM, PLAINLY)
        for ending in CUT_OFF
    ],
    "longer than announced": LONGER,
    "shorter than announced": [
        replace(script, framing=Framing.LENGTH, length_off=off, ending=ending)
        for script in (STREAM, PLAINLY, replace(STREAM, parts=(TEXT, UTF8)))
        for off in (1, 50, 1000)
        for ending in Ending
    ],
    "until a reset": both_kinds(framing=Framing.CLOSE, ending=Ending.RESET)
    + [Script((TEXT, UTF8), events=True, framing=Framing.CLOSE, ending=ending) for ending in Ending],
    "until a silence": both_kinds(framing=Framing.CLOSE),
}


@pytest.mark.parametrize("case", MALFORMED)
async def test_an_answer_that_is_not_what_its_framing_says(matrix: Matrix, case: str) -> None:
    assert await matrix.check_all((script, ask) for script in MALFORMED[case] for ask in asks(script))


async def test_what_comes_late_behind_an_answer_costs_its_connection(matrix: Matrix) -> None:
    """One at a time: a request that is sent before it comes gets it, as the protocol has it."""
    cut = [replace(script, cuts=20) for script in LONGER]
    assert await matrix.check_all(((script, ask) for script in cut for ask in asks(script)), at_once=1)


@pytest.mark.parametrize("status", ["400 Bad Request", "429 Too Many Requests", "500 Internal", "503 Unavailable"])
async def test_an_answer_with_an_errors_status(matrix: Matrix, status: str) -> None:
    bodies = (BROKEN, TOO_LONG, b"busy")
    whole = [
        Script((body,), events=False, status=status, framing=framing, ending=ending)
        for body in bodies
        for framing, ending in (
            (Framing.LENGTH, Ending.WAIT),
            (Framing.CHUNKED, Ending.WAIT),
            (Framing.CLOSE, Ending.CLOSE),
        )
    ]
    cut = [at(script, script.body, ending, 3) for script in whole[:2] for ending in Ending]
    assert await matrix.check_all((script, ask) for script in [*whole, *cut] for ask in asks(script))


FRAMINGS = [
    replace(SHORT, trailer=b"t: 1\r\n"),
    replace(SHORT, chunk=30, extension=b";a"),
    replace(SHORT, framing=Framing.LENGTH),
    replace(SHORT, framing=Framing.CLOSE, ending=Ending.CLOSE),
]
ONE_ASK = Ask(Api.CHAT, True)


@pytest.mark.parametrize("script", FRAMINGS, ids=["chunks", "chunks across events", "content-length", "until close"])
async def test_a_stream_cut_into_two_reads_at_any_byte(matrix: Matrix, script: Script) -> None:
    cut = (replace(script, cuts=(offset,)) for offset in range(len(script.wire)))
    assert await matrix.check_all((one, ONE_ASK) for one in cut)


@pytest.mark.parametrize("script", FRAMINGS, ids=["chunks", "chunks across events", "content-length", "until close"])
@pytest.mark.parametrize("ending", CUT_OFF)
async def test_an_engine_that_dies_at_any_byte(matrix: Matrix, script: Script, ending: Ending) -> None:
    stopped = (replace(script, stop=offset, ending=ending) for offset in range(len(script.wire) + 1))
    elsewhere = replace(ONE_ASK, elsewhere=True)
    assert await matrix.check_all((one, ask) for one in stopped for ask in (ONE_ASK, elsewhere))


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("ending", CUT_OFF)
async def test_a_plain_answer_that_ends_at_any_byte(matrix: Matrix, ending: Ending, version: str) -> None:
    kinds = [PLAINLY, replace(PLAINLY, framing=Framing.LENGTH), replace(PLAINLY, framing=Framing.CLOSE)]
    stopped = [replace(kind, stop=offset, ending=ending) for kind in kinds for offset in range(len(kind.wire) + 1)]
    assert await matrix.check_all((one, Ask(Api.CHAT, False, version)) for one in stopped)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Script, Ask]:
    """Any script, and a request that it may be an answer to."""
    events = draw(st.booleans())
    status = draw(st.sampled_from(["200 OK"] * 9 + ["400 Bad", "429 Many", "500 Internal", "503 Busy"]))
    stream = events
    if not status.startswith("200"):
        events = False
    if events:
        parts = draw(st.lists(st.sampled_from((*CONTENT, *CONTENT, USAGE, FAILED, REFUSED)), min_size=1, max_size=6))
        parts += draw(st.sampled_from([[DONE], [USAGE, DONE], [FINISH, DONE], [FINISH, USAGE, DONE], []]))
        parts = [crlf(part) if draw(st.booleans()) else part for part in parts] if draw(st.booleans()) else parts
    elif status.startswith("200"):
        parts = draw(st.lists(st.binary(min_size=1, max_size=40) | st.just(PLAIN), min_size=1, max_size=4))
    else:
        parts = [draw(st.sampled_from([BROKEN, TOO_LONG, b"busy", b"{}"]))]
    sizes = [len(part) for part in parts]
    together = st.lists(st.integers(1, 200) | st.sampled_from(sizes), min_size=2, max_size=6).map(tuple)
    script = Script(
        tuple(parts),
        events,
        status,
        framing=draw(st.sampled_from([Framing.CHUNKED, Framing.CHUNKED, Framing.LENGTH, Framing.CLOSE])),
        chunk=draw(st.sampled_from([0, 0, 0, -1]) | st.integers(1, 80) | together),
        extension=draw(st.sampled_from([b"", b"", b";a=b", b' ;q="1"'])),
        trailer=draw(st.sampled_from([b"", b"", b"t: 1\r\n", b"t: 1\r\nu: 2\r\n"])),
        interim=draw(st.sampled_from([0, 0, 0, 0, 1, 3])),
        ending=draw(st.sampled_from([Ending.WAIT, Ending.CLOSE, Ending.RESET])),
    )
    fault = draw(st.sampled_from(["none", "none", "stop", "stop", "stop", "length", "garbage"]))
    if fault == "stop":
        behind = draw(st.booleans())
        low, high = (len(script.head), len(script.wire)) if behind else (0, len(script.head))
        script = replace(script, stop=draw(st.integers(low, high)))
    elif fault == "length" and script.framing is Framing.LENGTH:
        script = replace(script, length_off=draw(st.integers(1 - len(script.body), 40)))
    elif fault == "garbage":
        place = draw(st.integers(0, 4)) if script.framing is Framing.CHUNKED else 0
        garbage = draw(st.sampled_from(CHUNK_GARBAGE if place else HEAD_GARBAGE))
        script = replace(script, garbage=garbage, garbage_at=place)
    every = st.sampled_from([0, 0, 1, 2, 3, 5, 17, 64])
    offsets = st.lists(st.integers(1, len(script.wire)), min_size=1, max_size=8).map(tuple)
    script = replace(script, cuts=draw(every | offsets))
    api = draw(st.sampled_from(STREAMS if stream else PLAIN_ONES))
    usage = stream and not api.kserve and draw(st.booleans())
    return script, Ask(api, stream, draw(st.sampled_from(["1.0", "1.1"])), draw(st.booleans()), usage)


@pytest.mark.timeout(120 + EXAMPLES)
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(case=cases())
async def test_any_script_leads_to_an_outcome_that_it_allows(matrix: Matrix, case: tuple[Script, Ask]) -> None:
    script, ask = case
    await matrix.check(script, ask)
    await matrix.running.until_idle()
