"""`headrace bench relay`: engine and load are compiled and run here, the gateway is real, the rounds are as small as
they can be."""

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gateway.upstream.http_connection import ConnectionPool
from gateway.upstream.triton.contract import detect
from gateway.upstream.triton.http_control import HttpControl
from headrace.bench.figures import BenchError, Plan
from headrace.bench.relay import comparison, figures
from headrace.bench.relay.comparison import FULL, QUICK, compare, measure
from headrace.bench.relay.load import Load
from headrace.bench.relay.peers import HAPROXY, NGINX, PEERS, SMG, Peer, Place, peer_part
from headrace.bench.relay.programs import Programs, compile_programs, find_compiler
from headrace.bench.relay.rounds import Sizes
from headrace.bench.relay.sides import DIRECT, ENGINE, GATEWAY, Engines, engine_part, fleet_spec
from headrace.bench.relay.stretches import (
    COMPLETION,
    LATENCY,
    ONE_CHUNK,
    PLACE,
    PROMPT_100K,
    STREAM,
    Stretch,
    make_request,
)
from headrace.local.ports import LOOPBACK, free_ports
from headrace.local.progress import PlainProgress
from headrace.local.run_dir import RunDir
from headrace.local.supervisor import Supervisor

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C compiler: the bench's engine cannot be built")

SMALL = Sizes(
    rounds=1,
    cost_s=0.3,
    latency_s=0.2,
    latency_streams=20,
    latency_chunks=3,
    rss_streams=20,
    held_streams=20,
    hold_s=0.5,
    grpc_streams=2,
)
FEW = replace(STREAM, connections=3, chunks=5, gap_us=1000)


def _err() -> Console:
    return Console(file=io.StringIO())


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def run(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunDir]:
    with RunDir(tmp_path_factory.mktemp("relay")) as folder:
        yield folder


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def programs(run: RunDir) -> Programs:
    return await compile_programs(run)


@pytest.fixture
async def engine(run: RunDir, programs: Programs) -> AsyncIterator[int]:
    """The port of a running stand-in engine."""
    engines = Engines(*free_ports(2))
    async with Supervisor(PlainProgress(_err())) as supervisor:
        await supervisor.start([engine_part(run, programs, engines)])
        yield engines.http


@pytest.fixture
def load(run: RunDir, programs: Programs) -> Load:
    return Load(programs.load, run.path)


def _payloads(body: str) -> list[str]:
    assert body.endswith("\n\n")
    return [event.removeprefix("data: ") for event in body[:-2].split("\n\n")]


async def _post(session: aiohttp.ClientSession, port: int, path: str, **body: Any) -> str:
    async with session.post(f"http://{LOOPBACK}:{port}{path}", json=body) as answer:
        assert answer.status == 200
        return await answer.text()


# The engine


@pytest.mark.parametrize("usage", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_the_engine_streams_as_an_openai_engine_does(engine: int, path: str, usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if usage else {}
    async with aiohttp.ClientSession() as session:
        body = await _post(session, engine, path, max_tokens=3, seed=500, stream=True, **options)
    *chunks, done = _payloads(body)
    assert done == "[DONE]"
    events = [json.loads(chunk) for chunk in chunks]
    if usage:
        last = events.pop()
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)
    choices = [event["choices"][0] for event in events]
    texts = [choice["delta"]["content"] if "chat" in path else choice["text"] for choice in choices]
    assert [text[:7] for text in texts] == ["@00000:", "@00001:", "@00002:"]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "stop"]
    assert not any("usage" in event for event in events)


async def test_the_engine_answers_in_one_piece_too(engine: int) -> None:
    async with aiohttp.ClientSession() as session:
        chat = json.loads(await _post(session, engine, "/v1/chat/completions", max_tokens=2))
        text = json.loads(await _post(session, engine, "/v1/completions", max_tokens=2))
    assert chat["choices"][0]["message"]["content"] == text["choices"][0]["text"] == "@00000 @00001 "
    assert chat["usage"]["completion_tokens"] == 2


async def test_the_engine_reads_long_prompts_on_a_connection_that_it_keeps(engine: int) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:
        for length in (400_000, 10, 4_000_000):
            body = await _post(session, engine, "/v1/completions", prompt="x" * length, max_tokens=1, stream=True)
            assert len(_payloads(body)) == 2
        async with session.get(f"http://{LOOPBACK}:{engine}/nothing") as answer:
            assert answer.status == 404


async def test_the_engines_triton_model_has_a_contract_the_gateway_knows(engine: int) -> None:
    pool = ConnectionPool("bench", f"http://{LOOPBACK}:{engine}")
    try:
        control = HttpControl(pool, 5.0)
        assert await control.unready("llmapi") is None
        assert await control.failed_ns("llmapi") == 0
        described = await control.describe("llmapi")
    finally:
        pool.close()
    contract = detect(described.metadata, described.config)
    assert (contract.kind, contract.decoupled, contract.cumulative) == ("llmapi", True, True)
    assert contract.inputs["seed"].name == "sampling_param_seed"


async def test_the_engines_triton_model_repeats_all_its_text(engine: int) -> None:
    async with aiohttp.ClientSession() as session:
        path = "/v2/models/llmapi/generate_stream"
        body = await _post(session, engine, path, text_input="x", sampling_param_max_tokens=2, sampling_param_seed=1)
    texts = [json.loads(payload)["text_output"] for payload in _payloads(body)]
    assert texts == ["@00000 ", "@00000 @00001 "]


# The load


@pytest.mark.parametrize("stretch", [FEW, ONE_CHUNK, PROMPT_100K, replace(COMPLETION, connections=3, gap_us=100)])
async def test_a_load_sees_every_piece_of_every_answer(load: Load, engine: int, stretch: Stretch) -> None:
    report = await load.run(engine, stretch, streams=40)
    assert (report.streams, report.errors, report.pieces) == (40, 0, 40 * stretch.chunks)
    assert 0 < report.p50_us <= report.p99_us


async def test_a_load_says_when_every_stream_has_begun(load: Load, engine: int) -> None:
    told = asyncio.Event()

    async def open_now() -> None:
        told.set()

    report = await load.run(engine, replace(FEW, connections=50), streams=50, when_open=open_now)
    assert told.is_set()
    assert report.most_open == 50


async def test_a_load_names_a_side_that_is_not_there(load: Load) -> None:
    (port,) = free_ports(1)
    report = await load.run(port, FEW, streams=FEW.connections)
    assert (report.streams, report.errors) == (0, FEW.connections)
    assert report.first_error == "no connection: Connection refused"


def _chunk(payload: str) -> bytes:
    return f"{len(payload):x}\r\n{payload}\r\n".encode()


def _piece(number: int, age_ns: int = 0) -> str:
    return f'data: {{"content":"@{number:05d}:{time.monotonic_ns() - age_ns:019d}"}}\n\n'


_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
_DONE, _END = "data: [DONE]\n\n", b"0\r\n\r\n"


@asynccontextmanager
async def _server(writes: Callable[[], list[bytes]]) -> AsyncIterator[int]:
    """A server that answers everything with the same writes: a fake, since no engine here can be made to be wrong."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
        for part in writes():
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)
        writer.close()

    server = await asyncio.start_server(answer, LOOPBACK, 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize(
    ("writes", "error"),
    [
        ([_HEAD, _chunk(_piece(0)), _chunk(_DONE), _END], "pieces in an answer: 1 instead of 2"),
        ([_HEAD, _chunk(_piece(0)), _chunk(_piece(1)), _END], "an answer ended without [DONE]"),
        ([_HEAD, _chunk(_piece(0)), _chunk(_piece(0)), _chunk(_DONE), _END], "an answer's pieces are out of order"),
        ([_HEAD, _chunk(_piece(1)), _chunk(_piece(0)), _chunk(_DONE), _END], "an answer's pieces are out of order"),
        ([_HEAD, _chunk(_piece(0)), _chunk(_piece(1)), _chunk(_DONE)], "an answer broke off: closed"),
        ([b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nfull"], "HTTP/1.1 503 Busy: full"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"], "HTTP/1.1 200 OK: {}"),
    ],
)
async def test_a_load_counts_an_answer_that_is_not_whole_as_an_error(
    load: Load, writes: list[bytes], error: str
) -> None:
    async with _server(lambda: writes) as port:
        report = await load.run(port, Stretch("wrong", 2, 0, 100, 1), streams=1)
    assert (report.streams, report.errors) == (0, 1)
    assert report.first_error.startswith(error)


@pytest.mark.parametrize("cut", [1, 3, 17])
async def test_a_load_reads_answers_however_they_are_cut(load: Load, cut: int) -> None:
    """Chunks that end within a piece, and reads that end within a chunk's size line."""
    payload = _piece(0) + _piece(1) + _DONE
    whole = _HEAD + b"".join(_chunk(payload[at : at + 7]) for at in range(0, len(payload), 7)) + _END
    async with _server(lambda: [whole[at : at + cut * 10] for at in range(0, len(whole), cut * 10)]) as port:
        report = await load.run(port, Stretch("cut", 2, 0, 100, 1), streams=1)
    assert (report.streams, report.errors, report.bytes) == (1, 0, len(payload))


async def test_a_load_tells_how_long_pieces_were_on_their_way(load: Load) -> None:
    age_s = 0.25
    async with _server(lambda: [_HEAD, _chunk(_piece(0, int(age_s * 1e9)) + _DONE), _END]) as port:
        report = await load.run(port, Stretch("late", 1, 0, 100, 1), streams=1)
    assert report.p50_us >= age_s * 1e6 * 0.96  # the width of the histogram's buckets


@given(st.integers(1, 600), st.integers(0, 2_000_000), st.integers(0, 5000), st.booleans())
def test_a_request_is_complete_and_asks_for_its_stretch(chunks: int, gap_us: int, prompt: int, chat: bool) -> None:
    head, _, body = make_request(Stretch("any", chunks, gap_us, prompt, 1, chat)).partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in head
    asked = json.loads(body)
    assert (asked["max_tokens"], asked.get("seed", 0), asked["stream"]) == (chunks, gap_us, True)
    text = asked["messages"][0]["content"] if chat else asked["prompt"]
    assert text.startswith(PLACE)
    assert len(text) == max(prompt, len(PLACE) + 1)
    assert PLACE.encode() not in head


# The comparison


async def _compare(asked: set[str], run: RunDir, programs: Programs, *peers: str) -> tuple[Any, dict[str, str]]:
    left_out: dict[str, str] = {}
    return await compare(frozenset(asked), SMALL, run, programs, left_out, _err(), peers), left_out


async def test_a_comparison_measures_the_gateway_in_every_way(run: RunDir, programs: Programs) -> None:
    asked = {
        *("us_per_stream_64chunk", "engine_us_per_stream_64chunk", "load_us_per_stream_64chunk"),
        *("added_latency_p99_us", "rss_per_stream_kb", "held_streams", "held_streams_lost", "held_us_per_chunk"),
        *("cpu_triton_token_vs_openai", "cpu_triton_grpc_token_vs_grpc_aio"),
    }
    measured, left_out = await _compare(asked, run, programs)
    assert left_out == {}
    assert asked <= {name for name, numbers in measured.rounds.items() if len(numbers) == 1}
    assert measured.rounds["held_streams"] == [SMALL.held_streams]
    assert measured.rounds["held_streams_lost"] == [0]
    assert measured.rounds["us_per_stream_64chunk"][0] > 0


def _stand_in(monkeypatch: pytest.MonkeyPatch, name: str, program: Path | None) -> None:
    """The peer's place taken by the engine, which answers as a side does."""
    peer = Peer(lambda: None if program is None else str(program), lambda place: (str(place.port),))
    monkeypatch.setitem(PEERS, name, peer)


async def test_a_peer_that_is_there_is_measured_beside_the_gateway(
    run: RunDir, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    _stand_in(monkeypatch, NGINX, programs.engine)
    _stand_in(monkeypatch, HAPROXY, None)
    _stand_in(monkeypatch, SMG, Path("/bin/false"))
    asked = {"cpu_64chunk_vs_nginx", "haproxy_us_per_stream_64chunk", "cpu_64chunk_vs_smg"}
    measured, left_out = await _compare(asked, run, programs, NGINX, HAPROXY, SMG)
    assert len(measured.rounds["cpu_64chunk_vs_nginx"]) == 1
    assert not {"haproxy_us_per_stream_64chunk", "cpu_64chunk_vs_smg"} & set(measured.rounds)
    assert left_out[HAPROXY] == "not installed: make bench-peers installs it"
    assert left_out[SMG].startswith("it does not start: smg ended with exit status 1")


async def test_a_machine_with_few_files_holds_what_it_can(
    run: RunDir, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "raise_file_limit", lambda: 520)
    measured, left_out = await _compare({"held_streams"}, run, programs)
    assert measured.rounds["held_streams"] == [10]
    assert left_out == {"more held streams": "this system lets a process open 520 files: 10 streams at most"}


async def test_no_compiler_is_one_sentence_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(BenchError, match="install a C compiler"):
        await measure(Plan(frozenset({"held_streams"}), quick=True), _err())


@pytest.mark.parametrize("named", [False, True])
async def test_a_quick_run_that_is_not_told_what_to_measure_leaves_out_what_takes_long(
    monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    seen: list[tuple[Any, ...]] = []

    async def note(*arguments: Any) -> None:
        seen.append(arguments)

    monkeypatch.setattr(comparison, "compare", note)
    asked = frozenset({"held_streams"}) if named else figures.EVERYTHING
    await measure(Plan(asked, quick=True, hold_s=7.5), _err())
    ((measured, sizes, _, _, left_out, _),) = seen
    assert sizes == replace(QUICK, hold_s=7.5)
    assert measured == (asked if named else figures.IN_A_MINUTE)
    assert ("held_streams" in measured) == named
    assert ("cpu_64chunk_vs_nginx" in measured) != named
    assert bool(left_out) != named


@pytest.mark.parametrize("name", list(PEERS))
def test_every_peer_that_is_installed_gets_this_runs_addresses(name: str, run: RunDir) -> None:
    place = Place(run, engine=18999, port=18998)
    options = " ".join(PEERS[name].options(place))
    written = "".join(path.read_text() for path in run.path.glob("*.[ncy]*") if path.name in options)
    assert "18999" in options + written
    assert "18998" in options + written
    part = peer_part(name, place)
    assert (part is None) == (PEERS[name].program() is None)


@pytest.mark.parametrize("figure", [ratio.figure.name for ratio in figures.RATIOS])
def test_a_ratio_needs_the_gateway_and_what_it_is_compared_with(figure: str) -> None:
    (ratio,) = (one for one in figures.RATIOS if one.figure.name == figure)
    assert ratio.stretch is not None
    assert figures.sides_of(ratio.stretch, {figure}) == [GATEWAY, ratio.side]
    assert figures.needed_peers({figure}) == [ratio.side]


def test_a_figure_of_the_engine_needs_no_side() -> None:
    assert figures.sides_of(STREAM, {"engine_us_per_stream_64chunk"}) == [DIRECT]
    assert figures.needed_peers({"engine_us_per_stream_64chunk", "held_streams"}) == []


def test_the_gateways_routes_lead_to_the_engines() -> None:
    spec = fleet_spec(Engines(http=18001, grpc=18002), 18003, 18004, grpc_engine=True)
    assert set(spec.routes) == set(spec.pools)
    assert {pool.needed_address for pool in spec.pools.values()} == {"http", "grpc"}


def test_a_quick_run_differs_in_amount_only() -> None:
    assert QUICK.rounds == 3
    assert QUICK.held_streams == FULL.held_streams == figures.HELD_STREAMS
    assert FULL.latency_streams == LATENCY.connections
    assert {GATEWAY, ENGINE}.isdisjoint(PEERS)
