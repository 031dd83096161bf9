"""What routing reads of a KServe request in JSON, however little of it there is."""

import gzip
import json
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http.kserve_paths import parse, why_unsupported
from router.kserve_json import READ_AHEAD_BYTES, inflate_start, read_generate, read_infer, view
from router.prefix import RAW_PROMPT_KEY_BYTES
from router.prompt import Fields, read_fields, read_prompt

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=3000)


def opening_of(text: str) -> bytes:
    return text.encode()[:RAW_PROMPT_KEY_BYTES]


def infer_json(text: str) -> bytes:
    tensors = [
        {"name": "max_tokens", "shape": [1, 1], "datatype": "INT32", "data": [9]},
        {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": [[text]]},
    ]
    return json.dumps({"inputs": tensors}).encode()


def infer_binary(text: str, before: bytes = b"") -> tuple[bytes, int]:
    content = text.encode()
    raw = struct.pack("<I", len(content)) + content
    tensors = [
        {"name": "image", "datatype": "UINT8", "parameters": {"binary_data_size": len(before)}},
        {"name": "seed", "datatype": "INT32", "data": [1]},
        {"name": "text_input", "datatype": "BYTES", "parameters": {"binary_data_size": len(raw)}},
    ]
    header = json.dumps({"inputs": tensors}).encode()
    return header + before + raw, len(header)


@given(texts, st.booleans())
def test_a_prompt_is_the_same_whichever_way_it_comes(text: str, ascii_only: bool) -> None:
    generate = json.dumps({"max_tokens": 3, "text_input": text}, ensure_ascii=ascii_only).encode()
    binary, length = infer_binary(text, b"\x00\xff" * 100)
    found = {
        read_generate(generate[:READ_AHEAD_BYTES]).prompt,
        read_generate(json.dumps({"text_input": [text]}).encode()).prompt,
        read_generate(json.dumps({"parameters": {"prompt": text}}).encode()).prompt,
        read_infer(infer_json(text), None).prompt,
        read_infer(binary, length).prompt,
    }
    assert found == {opening_of(text)}


@given(texts)
def test_a_prompt_finds_the_same_replica_through_either_api(text: str) -> None:
    fields: Fields = read_fields(json.dumps({"model": "m", "prompt": text}).encode())
    ours = view("m", read_generate(json.dumps({"text_input": text}).encode()), None, 1)
    assert ours.key == read_prompt("completions", fields).key


@given(texts, st.integers(0, 200))
def test_a_body_cut_anywhere_gives_a_beginning_of_the_prompt_or_nothing(text: str, cut: int) -> None:
    body = json.dumps({"text_input": text}, ensure_ascii=False).encode()
    found = read_generate(body[:cut]).prompt
    if "\\" not in body.decode():
        assert text.encode().startswith(found)


@given(st.binary(max_size=300), st.none() | st.integers(0, 400))
def test_no_bytes_are_refused(body: bytes, length: int | None) -> None:
    read_generate(body)
    read_infer(body, length)
    inflate_start(body)


def test_a_key_that_is_quoted_inside_a_string_is_not_taken_for_one() -> None:
    body = json.dumps({"note": '{"text_input": "wrong", "sequence_id": 3}', "text_input": "right"}).encode()
    assert read_generate(body).prompt == b"right"
    assert read_generate(body).sequence == ""


def test_token_ids_are_the_same_as_json_and_as_a_raw_tensor() -> None:
    ids = [5, 70_000, 0, -1]
    raw = struct.pack("<4i", *ids)
    tensor = {"name": "input_ids", "shape": [1, 4], "datatype": "INT32"}
    as_json = json.dumps({"inputs": [{**tensor, "data": ids}]}).encode()
    header = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": len(raw)}}]}).encode()
    assert read_infer(as_json, None).prompt == raw
    assert read_infer(header + raw, len(header)).prompt == raw
    assert read_generate(json.dumps({"input_ids": ids}).encode()).prompt == raw


@pytest.mark.parametrize(("written", "sequence"), [("7", "7"), ("0", ""), ('"a b"', "a b"), ('""', ""), ("null", "")])
def test_a_sequence_is_its_own_key(written: str, sequence: str) -> None:
    generate = read_generate(f'{{"text_input":"a","sequence_id":{written}}}'.encode())
    infer = read_infer(f'{{"parameters":{{"sequence_id":{written}}},"inputs":[]}}'.encode(), None)
    assert generate.sequence == infer.sequence == sequence
    if sequence:
        assert view("m", generate, None, 1).key == view("m", infer, None, 2).key


def test_requests_that_say_nothing_are_placed_by_turns_and_a_session_goes_first() -> None:
    nothing = read_infer(b"{}", None)
    assert len({view("m", nothing, None, turn).key for turn in range(100)}) == 100
    assert len({view("m", nothing, "s", turn).key for turn in range(100)}) == 1


def test_compressed_bodies_are_read_as_far_as_is_looked_at() -> None:
    body = infer_json("z" * 1_000_000)
    for packed in (gzip.compress(body), zlib.compress(body)):
        start = inflate_start(packed)
        assert len(start) == READ_AHEAD_BYTES
        assert read_infer(start, None).prompt == b"z" * RAW_PROMPT_KEY_BYTES


@pytest.mark.parametrize(
    ("path", "engine"),
    [
        ("/v2/models/m", "/base/v2/models/engine%20model"),
        ("/v2/models/a%2Fb/infer", "/base/v2/models/engine%20model/infer"),
        ("/v2/models/m/versions/12/generate_stream", "/base/v2/models/engine%20model/versions/12/generate_stream"),
    ],
)
def test_a_models_path_is_rewritten_to_the_engines_name(path: str, engine: str) -> None:
    found = parse(path)
    assert found is not None
    assert found.at("/base", "engine model") == engine
    assert found.model == ("a/b" if "%2F" in path else "m")


@pytest.mark.parametrize("path", ["/v2/models/", "/v2/models/m/", "/v2/models/m/versions/x", "/v2/models/m/foo", "/v2"])
def test_other_paths_are_no_models(path: str) -> None:
    assert parse(path) is None


def test_paths_of_triton_that_are_not_served_say_why() -> None:
    for path in ("/v2/repository/models/m/load", "/v2/systemsharedmemory/region/a/register", "/v2/logging"):
        assert why_unsupported(path) is not None
    assert why_unsupported("/v2/models/m/trace/setting") is not None
    assert why_unsupported("/v2/health/live") is None
