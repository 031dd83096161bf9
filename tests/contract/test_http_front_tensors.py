"""tritonclient's HTTP client and generated tensors: what Triton answers directly, it answers through the gateway."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient import http as tritonhttp
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.contract.http_front import Front, ask, http_front

NUMPY: dict[str, Any] = {
    "BOOL": np.bool_, "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64,
    "INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64,
    "FP16": np.float16, "FP32": np.float32, "FP64": np.float64, "STRING": np.object_,
}  # fmt: skip
DATATYPE = {name: "BYTES" if name == "STRING" else name for name in NUMPY}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def front() -> AsyncIterator[Front]:
    async with http_front() as started:
        yield started


def array(datatype: str, rows: int, columns: int) -> Any:
    values = np.arange(rows * columns).reshape(rows, columns)
    if datatype == "STRING":
        return np.array([f"Grüße {value} 🙂\0".encode() for value in values.flatten()], dtype=np.object_).reshape(
            rows, columns
        )
    return values.astype(NUMPY[datatype])


def infer(address: str, *, binary: bool, **options: Any) -> dict[str, Any]:
    """The outputs of one `infer` over all datatypes, by the synchronous client."""
    with tritonhttp.InferenceServerClient(address.removeprefix("http://")) as client:
        inputs, outputs = [], []
        for name in NUMPY:
            if name == "FP16" and not binary:
                continue  # has no form in JSON
            values = array(name, 3, 5)
            tensor = tritonhttp.InferInput(f"{name}_IN", values.shape, np_to_triton_dtype(values.dtype))
            tensor.set_data_from_numpy(values, binary_data=binary)
            inputs.append(tensor)
            outputs.append(tritonhttp.InferRequestedOutput(f"{name}_OUT", binary_data=binary))
        result = client.infer("typed_identity", inputs, outputs=outputs, request_id="r-7", **options)
        assert result.get_response()["id"] == "r-7"
        return {output.name(): result.as_numpy(output.name()) for output in outputs}


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("up", [None, "gzip", "deflate"])
@pytest.mark.parametrize("down", [None, "gzip", "deflate"])
async def test_tritonclient_gets_its_tensors_back(front: Front, binary: bool, up: str | None, down: str | None) -> None:
    found = await asyncio.to_thread(
        infer,
        front.running.url,
        binary=binary,
        request_compression_algorithm=up,
        response_compression_algorithm=down,
    )
    for name, values in found.items():
        sent = array(name.removesuffix("_OUT"), 3, 5)
        if name == "STRING_OUT" and not binary:
            values = np.vectorize(str.encode, otypes=[object])(values)
        assert np.array_equal(values, sent), name


async def test_tritonclient_learns_of_models_what_triton_says(front: Front) -> None:
    def ask_everything(address: str) -> list[Any]:
        with tritonhttp.InferenceServerClient(address.removeprefix("http://")) as client:
            return [
                client.is_server_live(),
                client.is_server_ready(),
                client.is_model_ready("ensemble"),
                client.is_model_ready("ensemble", "1"),
                client.is_model_ready("ensemble", "7"),
                client.is_model_ready("nope"),
                client.get_model_metadata("ensemble"),
                client.get_model_config("ensemble"),
                client.get_inference_statistics("typed_identity"),
                [(model["name"], model["state"]) for model in client.get_model_repository_index()],
            ]

    through = await asyncio.to_thread(ask_everything, front.running.url)
    direct = await asyncio.to_thread(ask_everything, front.triton.http)
    assert ("renamed", "READY") in through[-1]
    through[-1] = [entry for entry in through[-1] if entry[0] != "renamed"]
    assert through == direct


async def test_statistics_of_all_models_are_those_of_the_routes(front: Front) -> None:
    status, _, body = await ask(front.running.url, "/v2/models/stats", "GET")
    assert status == 200
    stats = json.loads(body)["model_stats"]
    assert sorted(entry["name"] for entry in stats) == ["ensemble", "ensemble_whole", "renamed", "typed_identity"]
    assert all("inference_stats" in entry for entry in stats)


async def test_what_belongs_to_each_triton_is_refused_with_a_reason(front: Front) -> None:
    def refusals(address: str) -> list[str]:
        said = []
        with tritonhttp.InferenceServerClient(address.removeprefix("http://")) as client:
            for call in (
                lambda: client.load_model("ensemble"),
                lambda: client.unload_model("ensemble"),
                client.get_system_shared_memory_status,
                lambda: client.register_system_shared_memory("a", "/a", 8),
                client.get_cuda_shared_memory_status,
                client.get_trace_settings,
                client.get_log_settings,
            ):
                with pytest.raises(InferenceServerException) as refused:
                    call()
                assert refused.value.status() == "501"
                said.append(refused.value.message())
        return said

    for reason in await asyncio.to_thread(refusals, front.running.url):
        assert reason.endswith((".", "there."))
        assert "Triton" in reason or "engine" in reason


odd = st.sampled_from([None, True, 7, -1, 2**70, 0.5, "text", "", [], [[1]], {}, {"a": 1}])
tensors = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from([f"{name}_IN" for name in NUMPY] + ["text_input", "nope", ""]) | odd,
        "shape": st.lists(st.integers(-1, 4), max_size=3) | odd,
        "datatype": st.sampled_from([*DATATYPE.values(), "NOPE"]) | odd,
        "data": st.lists(st.integers(-300, 300) | st.booleans() | st.text(max_size=3) | st.floats(-9, 9), max_size=6)
        | odd,
        "parameters": st.dictionaries(st.sampled_from(["binary_data_size", "classification", "x"]), odd, max_size=2)
        | odd,
    },
)
requests = st.fixed_dictionaries(
    {},
    optional={
        "id": st.text(max_size=5) | odd,
        "inputs": st.lists(tensors, max_size=3) | odd,
        "outputs": st.lists(tensors, max_size=2) | odd,
        "parameters": st.dictionaries(st.sampled_from(["sequence_id", "priority", "timeout", "x"]), odd, max_size=3)
        | odd,
    },
)


@st.composite
def sound_requests(draw: Any) -> tuple[bytes, str | None]:
    """A body that Triton takes, mostly, and its header length: JSON and binary tensors of any datatype and shape."""
    inputs, tail = [], b""
    for name in draw(st.lists(st.sampled_from(list(NUMPY)), max_size=4, unique=True)):
        values = array(name, draw(st.integers(0, 4)), draw(st.integers(0, 4)))
        tensor: dict[str, Any] = {"name": f"{name}_IN", "shape": values.shape, "datatype": DATATYPE[name]}
        if name == "FP16" or draw(st.booleans()):
            made = tritonhttp.InferInput(f"{name}_IN", values.shape, DATATYPE[name])
            made.set_data_from_numpy(values)
            raw = made._get_binary_data() or b""
            tail += raw
            tensor["parameters"] = {"binary_data_size": len(raw) + draw(st.sampled_from([0, 0, 0, 0, 1, -1]))}
        else:
            flat = [value.decode() if isinstance(value, bytes) else value.item() for value in values.flatten()]
            tensor["data"] = (
                flat if draw(st.booleans()) else values.astype(object).tolist() if name != "STRING" else flat
            )
        inputs.append(tensor)
    body: dict[str, Any] = {"inputs": inputs}
    if draw(st.booleans()):
        body["parameters"] = {"binary_data_output": draw(st.booleans())}
    header = json.dumps(body).encode()
    length = None if not tail else str(len(header) + draw(st.sampled_from([0, 0, 0, 0, 1, -1, 10_000])))
    return header + tail, length


async def same_answers(front: Front, path: str, body: bytes, length: str | None) -> tuple[int, bytes]:
    """The answer to a body, which must be the same through the gateway and directly."""
    headers = {"accept-encoding": "identity", "content-type": "application/octet-stream"}
    if length is not None:
        headers["inference-header-content-length"] = length
    direct = await ask(front.triton.http, path, data=body, headers=headers)
    through = await ask(front.running.url, path, data=body, headers=headers)
    assert (through[0], through[2]) == (direct[0], direct[2])
    name = "inference-header-content-length"
    assert through[1].get(name) == direct[1].get(name)
    return through[0], through[2]


async def checked(front: Front, cases: list[tuple[str, bytes, str | None]]) -> set[int]:
    return {(await same_answers(front, path, body, length))[0] for path, body, length in cases}


def generated(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    """That many examples, the same in every run: the loop that runs the test cannot run inside hypothesis."""
    found: list[Any] = []

    @settings(
        max_examples=count, database=None, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(strategy)
    def collect(example: Any) -> None:
        found.append(example)

    collect()
    return found


async def test_generated_tensors_come_back_the_same(front: Front) -> None:
    path = "/v2/models/typed_identity/infer"
    statuses = await checked(front, [(path, body, length) for body, length in generated(sound_requests(), 400)])
    assert {200, 400} <= statuses


async def test_malformed_requests_get_tritons_own_refusal(front: Front) -> None:
    paths = st.sampled_from(["/v2/models/typed_identity/infer", "/v2/models/ensemble_whole/infer"])
    bodies = requests.map(lambda body: json.dumps(body).encode())
    cut = st.tuples(bodies, st.integers(0, 400)).map(lambda pair: pair[0][: pair[1]])
    lengths = st.none() | st.sampled_from(["0", "2", "50", "100000", "-1", "x", ""])
    cases = generated(st.tuples(paths, bodies | cut | st.binary(max_size=50), lengths), 400)
    statuses = await checked(front, cases)
    assert 400 in statuses


async def test_generated_generate_bodies_are_answered_as_by_triton(front: Front) -> None:
    body = st.fixed_dictionaries(
        {},
        optional={
            "text_input": st.text(max_size=20) | odd,
            "max_tokens": st.integers(1, 20) | odd,
            "stream": st.booleans() | odd,
            "stop_words": st.lists(st.text(max_size=3), max_size=2) | odd,
            "temperature": st.floats(0, 2) | odd,
            "unknown": odd,
            "id": odd,
            "parameters": st.dictionaries(st.sampled_from(["max_tokens", "x"]), odd, max_size=2) | odd,
        },
    ).map(lambda body: json.dumps(body).encode())
    paths = st.sampled_from(["/v2/models/ensemble/generate", "/v2/models/ensemble_whole/generate_stream"])
    statuses = await checked(front, [(path, made, None) for path, made in generated(st.tuples(paths, body), 300)])
    assert {200, 400} <= statuses
