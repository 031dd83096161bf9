"""Several answers in one stream: whatever the order of their messages, each is what it would be alone."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.upstream.triton import choices as choices_module
from gateway.upstream.triton.answer import STOP_GRACE, Answer, Message
from gateway.upstream.triton.choices import AnswerTooLongError, ManyChoices, NotNumberedError, OneChoice
from gateway.upstream.triton.contract import Contract, Tensor
from gateway.upstream.triton.wire import Wire

CONTRACT = Contract(
    "ensemble", "m", True, True, False, {"prompt": Tensor("text_input", "BYTES")}, {"text": "text_output"}
)
STOP = ("ab", "🙂")
MAX_TOKENS = 12


def answer(max_tokens: int = MAX_TOKENS) -> Answer:
    return Answer(CONTRACT, max_tokens=max_tokens, stop=STOP, kv_block_tokens=None)


def wire(index: int = 0) -> Wire:
    return Wire(chat=False, request_id="r", created=1, model="m", include_usage=True, index=index)


def many(n: int, *, stream: bool = True) -> ManyChoices:
    return ManyChoices(n, answer, wire, stream=stream)


def part(index: int | None, text: bytes, tokens: int = 1) -> Message:
    counts = {"prompt_tokens": 7, "completion_tokens": tokens}
    return Message(text=text, sequence=index, counts=counts)


def parsed(events: bytes) -> list[dict[str, Any]]:
    payloads = [event.removeprefix(b"data: ") for event in events.split(b"\n\n") if event]
    assert payloads.count(b"[DONE]") == 1
    assert payloads[-1] == b"[DONE]"
    return [json.loads(payload) for payload in payloads[:-1]]


PIECES = st.lists(
    st.binary(min_size=1, max_size=4) | st.sampled_from([b"a", b"b", *"🙂é".encode().split()]), max_size=9
)


@given(st.lists(PIECES, min_size=2, max_size=4), st.data())
def test_each_choice_is_what_it_would_be_alone_in_any_order(answers: list[list[bytes]], data: st.DataObject) -> None:
    pieces = [each or [b""] for each in answers]
    streamed, whole = many(len(pieces)), many(len(pieces), stream=False)
    events = streamed.opening()
    left = [list(each) for each in pieces]
    while any(left):
        index = data.draw(st.sampled_from([index for index, each in enumerate(left) if each]))
        piece = left[index].pop(0)
        events += streamed.take(part(index, piece))
        assert whole.take(part(index, piece)) == b""
    chunks = parsed(events + streamed.finish())
    assert whole.finish() == b""
    body = json.loads(whole.whole())
    generated = 0
    for index, each in enumerate(pieces):
        alone = OneChoice(answer(), wire(), stream=False)
        for piece in each:
            alone.take(part(None, piece))
        alone.finish()
        expected = json.loads(alone.whole())
        generated += expected["usage"]["completion_tokens"]
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in own) == expected["choices"][0]["text"]
        assert [choice["finish_reason"] for choice in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1]["finish_reason"] == expected["choices"][0]["finish_reason"]
        assert body["choices"][index] == {**expected["choices"][0], "index": index}
    usage = {"prompt_tokens": 7, "completion_tokens": generated, "total_tokens": 7 + generated}
    assert body["usage"] == usage
    assert [chunk["usage"] for chunk in chunks if chunk["usage"]] == [usage]


def test_a_choice_is_closed_as_soon_as_its_text_says_so() -> None:
    choices = many(3)
    stopped = choices.take(part(0, b"xab"))
    assert b'"index":0,"text":"x"' in stopped
    assert b'"finish_reason":"stop"' in stopped
    assert b'"finish_reason":"length"' in choices.take(part(1, b"all", MAX_TOKENS))
    assert b'"finish_reason":null' in choices.take(part(2, b"more"))
    assert choices.take(part(0, b"after")) == choices.take(part(1, b"after")) == b""
    rest = choices.finish()
    assert rest.count(b'"finish_reason"') == 1
    assert b'"index":2' in rest


def test_an_engine_that_goes_on_is_left_when_all_choices_are_closed_and_not_before() -> None:
    choices = many(2)
    for _ in range(STOP_GRACE + 2):
        choices.take(part(0, b"ab"))
    assert not choices.overrun
    choices.take(part(1, b"ab"))
    assert choices.overrun


def test_what_is_not_numbered_rightly_is_no_answer() -> None:
    choices = many(2)
    assert choices.take(part(None, b"")) == b""
    with pytest.raises(NotNumberedError):
        choices.take(part(None, b"text"))
    choices.take(part(0, b"text"))
    for index in (None, -1, 2):
        with pytest.raises(ValueError, match="a part of an"):
            choices.take(part(index, b"text"))
    with pytest.raises(ValueError, match="number 1 did not come"):
        choices.finish()


def test_all_choices_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices_module, "ANSWER_LIMIT", 5)
    choices = many(2, stream=False)
    choices.take(part(0, b"xxx"))
    with pytest.raises(AnswerTooLongError):
        choices.take(part(1, b"yyy"))
