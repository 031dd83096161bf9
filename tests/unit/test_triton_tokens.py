"""Answers detokenised piece by piece are the text that decoding all ids at once gives."""

import codecs
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from gateway.upstream.triton.detokenizer import Detokenizer
from gateway.upstream.triton.token_form import stop_words
from gateway.upstream.triton.tokens import INLINE_CHARACTERS, TokenCodec, TokenizerError, load_tokenizer
from headrace.config import ConfigError, load_fleet
from tests.tokenizer import SAMPLE, SPECIALS, byte_level, metaspace


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


@pytest.fixture(scope="module")
def bytes_tokenizer(folder: Path) -> tuple[Tokenizer, TokenCodec]:
    return byte_level(folder / "bytes.json"), load_tokenizer(str(folder / "bytes.json"))


@pytest.fixture(scope="module")
def metaspace_tokenizer(folder: Path) -> tuple[Tokenizer, TokenCodec]:
    return metaspace(folder / "metaspace.json"), load_tokenizer(str(folder / "metaspace.json"))


def in_pieces(codec: TokenCodec, ids: list[int], cuts: list[int], *, logprobs: bool = False) -> str:
    """The text of an answer that comes cut at `cuts`."""
    detokenizer = Detokenizer(codec, frozenset(), prompt_tokens=1, logprobs=logprobs)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    ends = sorted(min(cut, len(ids)) for cut in cuts)
    text = ""
    for start, end in zip([0, *ends], [*ends, len(ids)], strict=True):
        if start < end:
            text += detokenizer.feed(ids[start:end], [-1.0] * (end - start), decoder)
    assert detokenizer.count == len(ids)
    return text + decoder.decode(b"", final=True)


any_cuts = st.lists(st.integers(0, 60), max_size=10)


@given(st.lists(st.integers(0, 700), max_size=60), any_cuts, st.booleans())
@settings(max_examples=400)
def test_any_ids_in_any_pieces_give_the_text_of_all_at_once(
    bytes_tokenizer: tuple[Tokenizer, TokenCodec], ids: list[int], cuts: list[int], logprobs: bool
) -> None:
    tokenizer, codec = bytes_tokenizer
    assert in_pieces(codec, ids, cuts, logprobs=logprobs) == tokenizer.decode(ids, skip_special_tokens=True)


@given(st.text(max_size=40) | st.just(SAMPLE), any_cuts)
def test_an_encoded_text_comes_back_in_any_pieces(
    bytes_tokenizer: tuple[Tokenizer, TokenCodec], text: str, cuts: list[int]
) -> None:
    _, codec = bytes_tokenizer
    if not any(special in text for special in SPECIALS):
        assert in_pieces(codec, codec.encode(text, add_special=False), cuts) == text


@given(st.text(st.sampled_from(sorted(set(SAMPLE) | set("€𝄞"))), max_size=40), any_cuts)
def test_with_byte_fallback_an_answer_is_what_it_adds_to_its_prompt(
    metaspace_tokenizer: tuple[Tokenizer, TokenCodec], text: str, cuts: list[int]
) -> None:
    tokenizer, codec = metaspace_tokenizer
    whole = codec.encode("a" + text, add_special=False)
    prompt = codec.encode("a", add_special=False)
    if whole[: len(prompt)] != prompt:
        return  # the first letters of the text have become one token with the prompt
    assert tokenizer.decode(whole) == "a" + in_pieces(codec, whole[len(prompt) :], cuts)


def test_no_piece_shows_half_a_character(bytes_tokenizer: tuple[Tokenizer, TokenCodec]) -> None:
    _, codec = bytes_tokenizer
    detokenizer = Detokenizer(codec, frozenset(), prompt_tokens=1)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces = [detokenizer.feed([id_], (), decoder) for id_ in codec.encode("𝔘🙂漢", add_special=False)]
    assert "".join(pieces) == "𝔘🙂漢"
    assert "�" not in "".join(pieces)


def test_the_text_ends_before_the_first_end_and_the_count_with_it(
    bytes_tokenizer: tuple[Tokenizer, TokenCodec],
) -> None:
    _, codec = bytes_tokenizer
    ids = codec.encode("one two", add_special=False)
    detokenizer = Detokenizer(codec, frozenset({1, 2}), prompt_tokens=1)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    assert detokenizer.feed([*ids, 2, 1, *ids], (), decoder) == "one two"
    assert (detokenizer.ended, detokenizer.count) == (True, len(ids) + 1)


def test_a_prompt_in_front_of_the_answer_is_left_out(bytes_tokenizer: tuple[Tokenizer, TokenCodec]) -> None:
    _, codec = bytes_tokenizer
    prompt, ids = ([0, *codec.encode(text, add_special=False)] for text in ("question", "answer"))
    detokenizer = Detokenizer(codec, frozenset(), prompt_tokens=len(prompt), prompt=prompt)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    assert detokenizer.feed(prompt + ids, (), decoder) == "answer"
    assert detokenizer.count == len(ids)


def test_a_raw_prompt_gets_the_first_token_once(bytes_tokenizer: tuple[Tokenizer, TokenCodec]) -> None:
    _, codec = bytes_tokenizer
    assert codec.bos == 0
    plain = codec.encode("a b", add_special=False)
    assert codec.encode("a b", add_special=True) == codec.encode("<s>a b", add_special=True) == [0, *plain]
    assert codec.encode("<s><s>", add_special=True) == [0, 0]


async def test_a_long_prompt_is_encoded_like_a_short_one(bytes_tokenizer: tuple[Tokenizer, TokenCodec]) -> None:
    _, codec = bytes_tokenizer
    text = SAMPLE * (INLINE_CHARACTERS // len(SAMPLE) + 1)
    assert await codec.encode_prompt(text, add_special=True) == codec.encode(text, add_special=True)


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=4).map(tuple), min_size=1, max_size=4).map(tuple))
def test_stop_words_are_read_back_from_their_two_rows(words: tuple[tuple[int, ...], ...]) -> None:
    ids, offsets = stop_words(words)
    assert len(ids) == len(offsets)
    ends = [end for end in offsets if end != -1]
    assert offsets[len(ends) :] == [-1] * (len(ids) - len(ends))
    assert tuple(tuple(ids[a:b]) for a, b in zip([0, *ends], ends, strict=False)) == words


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"hello", "is no tokenizer.json"),
        (b"{}", "neither byte-level nor metaspace"),
        (b'{"decoder": {"type": "ByteLevel"}}', "is no tokenizer.json that can be read"),
        (b'{"decoder": {"type": "WordPiece"}}', "neither byte-level nor metaspace (WordPiece)"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused_with_the_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes(content)
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(str(file))
    assert reason in str(caught.value)


def test_a_file_that_is_not_there_or_cannot_be_read_is_named_as_such(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="is not on this gateway"):
        load_tokenizer(str(tmp_path / "none.json"))
    with pytest.raises(TokenizerError, match="cannot be read"):
        load_tokenizer(str(tmp_path))


def test_a_changed_file_is_loaded_again(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    byte_level(file)
    first = load_tokenizer(str(file))
    assert load_tokenizer(str(file)) is first
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    words.decoder = decoders.ByteLevel()
    words.save(str(file))
    assert load_tokenizer(str(file)).id_of("<s>") is None


FLEET = """\
fleet: demo
pools:
  raw:
    protocol: triton
    model: tensorrt_llm
    tokenizer: {file: tokenizer.json, eos: "</s>"}
    chat_template: {text: x}
    endpoints: [{id: a, grpc: "h:1"}]
routes: {r: {pool: raw, retention: {prompt: 80}}}
gateway: {auth: {anonymous: allow}}
"""


def test_a_fleets_tokenizer_is_found_beside_its_file_and_published_as_a_path(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(FLEET)
    byte_level(tmp_path / "tokenizer.json")
    loaded = load_fleet(fleet, {})
    tokenizer = loaded.spec.pools["raw"].tokenizer
    assert tokenizer is not None
    assert tokenizer.file == str(tmp_path / "tokenizer.json")
    assert loaded.warnings == []


@pytest.mark.parametrize(
    ("old", "new", "where", "problem"),
    [
        ("file: tokenizer.json", "file: none.json", "6:17: pools.raw.tokenizer.file", "is not on this gateway"),
        ("</s>", "<eos>", "6:5: pools.raw.tokenizer", "the tokenizer has no token '<eos>'"),
        ("prompt: 80", "prompt: 101", "9:", "must be at most 100"),
        ("prompt: 80", "duration: 1s", "9:", "needs `prompt` or `decode`"),
    ],
)
def test_a_tokenizer_or_retention_that_cannot_be_used_is_named_at_its_line(
    tmp_path: Path, old: str, new: str, where: str, problem: str
) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(FLEET.replace(old, new))
    byte_level(tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError) as caught:
        load_fleet(fleet, {})
    (line,) = str(caught.value).splitlines()
    assert f"{fleet}:{where}" in line
    assert problem in line
