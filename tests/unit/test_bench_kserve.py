"""`headrace bench grpc`: proxies and stand-in engine are real processes here, the rounds as small as they can be."""

import asyncio
import io
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tritonclient.grpc import service_pb2

from gateway.upstream.triton.contract import detect
from headrace.bench.figures import BenchError
from headrace.bench.kserve.bare_proxy import name_field, stream_name_field
from headrace.bench.kserve.comparison import FIGURES, FULL, QUICK, compare
from headrace.bench.kserve.engine import model_config, model_metadata
from headrace.bench.kserve.load import Load
from headrace.bench.kserve.messages import MODEL_OF_ROUTE, ONCE, STREAM, stream_responses, text_request, text_response
from headrace.bench.kserve.rounds import Sizes
from headrace.bench.kserve.sides import BARE, ENGINE, GATEWAY, Ports, address_of, engine_part, fleet_spec, proxy_parts
from headrace.local.errors import LocalFleetError
from headrace.local.part import Part
from headrace.local.ports import free_ports
from headrace.local.progress import PlainProgress
from headrace.local.run_dir import RunDir
from headrace.local.supervisor import Supervisor

SMALL = Sizes(
    rounds=1,
    unary_calls=400,
    unary_at_once=4,
    streams=4,
    streams_at_once=2,
    stream_messages=200,
    latency_calls=5,
    tensor_bytes=8 * 1024 * 1024,
)
ALL = frozenset(figure.name for figure in FIGURES)
names = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=60)


def _err() -> Console:
    return Console(file=io.StringIO())


@pytest.fixture
def ports() -> Ports:
    return Ports(*free_ports(6))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    with RunDir(tmp_path) as folder:
        yield folder


def _all_bare(run: RunDir, ports: Ports) -> list[Part]:
    """The gateway's place taken by a second bare proxy: what is tested here is the comparison, not the gateway."""
    _, bare, renaming = proxy_parts(run, ports)
    stand_in = proxy_parts(run, replace(ports, bare=ports.grpc))[1]
    return [replace(stand_in, name=GATEWAY), bare, renaming]


@pytest.fixture
async def served(run: RunDir, ports: Ports) -> AsyncIterator[Ports]:
    """The engine and every proxy, up."""
    async with Supervisor(PlainProgress(_err())) as supervisor:
        await supervisor.start([engine_part(run, ports, SMALL.stream_messages)])
        await supervisor.start(_all_bare(run, ports))
        yield ports


async def test_a_comparison_measures_every_figure_in_every_round(run: RunDir, ports: Ports) -> None:
    engine = engine_part(run, ports, SMALL.stream_messages)
    measured = await compare(ALL, SMALL, ports, engine, _all_bare(run, ports), _err())
    assert set(measured.rounds) == ALL
    assert {len(numbers) for numbers in measured.rounds.values()} == {SMALL.rounds}
    assert measured.rounds["us_per_unary"][0] > 0


async def test_a_comparison_runs_only_what_its_figures_need(run: RunDir, ports: Ports) -> None:
    engine = engine_part(run, ports, SMALL.stream_messages)
    asked = frozenset({"bare_added_latency_unary_us"})
    measured = await compare(asked, SMALL, ports, engine, _all_bare(run, ports), _err())
    assert set(measured.rounds) == {name for name in ALL if name.endswith("added_latency_unary_us")}


async def test_a_side_that_cannot_start_is_named_with_its_log(run: RunDir, ports: Ports) -> None:
    proxies = _all_bare(run, ports)
    proxies[1] = replace(proxies[1], command=(*proxies[1].command, "--no-such-option"))
    with pytest.raises(LocalFleetError, match=r"(?s)bare ended with exit status 2.*--no-such-option"):
        await compare(ALL, SMALL, ports, engine_part(run, ports, SMALL.stream_messages), proxies, _err())


async def test_a_load_counts_answers(served: Ports) -> None:
    load = Load(BARE, address_of(BARE, served))
    try:
        assert len(await load.unary(20, 4)) == 20
        with pytest.raises(BenchError, match="bare answered a stream with 200 messages instead of 201"):
            await load.streams(2, 1, SMALL.stream_messages + 1)
        await load.tensor(8 * 1024 * 1024)
    finally:
        await load.close()


async def test_a_load_names_the_side_that_refuses(ports: Ports) -> None:
    load = Load(ENGINE, address_of(ENGINE, ports))
    try:
        with pytest.raises(BenchError, match="engine answered UNAVAILABLE"):
            await asyncio.wait_for(load.unary(2, 2), 30)
    finally:
        await load.close()


@given(names, names)
def test_appended_fields_rename_a_message_and_change_nothing_else(before: str, after: str) -> None:
    request = service_pb2.ModelInferRequest.FromString(text_request(before) + name_field(after))
    assert request.model_name == after
    assert (
        request.raw_input_contents == service_pb2.ModelInferRequest.FromString(text_request(before)).raw_input_contents
    )
    (message,) = stream_responses(before, 1)
    streamed = service_pb2.ModelStreamInferResponse.FromString(message + stream_name_field(after)).infer_response
    assert streamed.model_name == after
    assert streamed.parameters["triton_final_response"].bool_param
    assert (
        streamed.raw_output_contents
        == service_pb2.ModelInferResponse.FromString(text_response(before)).raw_output_contents
    )


def test_only_the_last_message_of_a_stream_is_final() -> None:
    parsed = [service_pb2.ModelStreamInferResponse.FromString(one) for one in stream_responses("m", 3)]
    assert [one.infer_response.parameters["triton_final_response"].bool_param for one in parsed] == [False, False, True]


@pytest.mark.parametrize("route", [ONCE, STREAM])
def test_the_engines_text_models_have_a_contract_the_gateway_knows(route: str) -> None:
    model = MODEL_OF_ROUTE[route]
    contract = detect(model_metadata(model), model_config(model).config)
    assert (contract.kind, contract.decoupled) == ("ensemble", route == STREAM)


def test_routes_are_called_otherwise_than_the_engines_models(ports: Ports) -> None:
    spec = fleet_spec(ports)
    assert not set(spec.routes) & {pool.model for pool in spec.pools.values()}


def test_a_quick_run_differs_in_amount_only() -> None:
    assert QUICK.rounds == 3
    assert (QUICK.tensor_bytes, QUICK.stream_messages, QUICK.unary_at_once) == (
        FULL.tensor_bytes,
        FULL.stream_messages,
        FULL.unary_at_once,
    )
