"""A text request in the form of the raw engine: what the other contracts' Python models make of it in front of theirs.

**Where an answer ends.** The engine is given one `end_id`: the tokenizer's `eos`, else the chat template's, else the
first of the pool's stop strings that is one token. All stop strings of pool and request go along as token sequences
(`stop_words_list`). A stop string that is a special token leaves no text behind, so the gateway looks for its id; any
other it looks for in the text, whichever tokens that came in.

**Stop words** are INT32[2, n]: the sequences' ids in a row, and below where each of them ends, padded with -1.
"""

from dataclasses import dataclass
from typing import Any

from gateway.upstream.triton.contract import RETENTION
from gateway.upstream.triton.tokens import TokenCodec, TokenizerError
from router.spec.fleet import PoolSpec, RetentionSpec
from router.spec.units import seconds


@dataclass(slots=True, frozen=True)
class Ends:
    """Where answers of one request end."""

    end: int | None
    """The id the engine is told."""
    ids: frozenset[int]
    """The ids that end the answer when they come."""
    words: tuple[tuple[int, ...], ...]
    """The stop strings as tokens."""

    def fields(self) -> dict[str, Any]:
        """Values for the contract's fields."""
        fields: dict[str, Any] = {}
        if self.end is not None:
            fields["end"] = fields["pad"] = self.end
        if self.words:
            fields["stop"] = stop_words(self.words)
        return fields


def end_id(codec: TokenCodec, spec: PoolSpec) -> int | None:
    """The id that ends an answer of the pool's model, if anything says which. Raises TokenizerError if the token that
    is said to is none."""
    template = spec.chat_template
    named = (spec.tokenizer.eos if spec.tokenizer is not None else "") or (template.eos if template is not None else "")
    if named:
        found = codec.id_of(named)
        if found is None:
            raise TokenizerError(f"the tokenizer has no token {named!r}, which the pool names as `eos`")
        return found
    stops = template.stop if template is not None else ()
    return next((id_ for stop in stops if (id_ := codec.id_of(stop)) is not None), None)


def ends_of(codec: TokenCodec, spec: PoolSpec, stops: tuple[str, ...]) -> Ends:
    """The ends of a request whose stop strings, the pool's included, are `stops`."""
    end = end_id(codec, spec)
    known = {stop: codec.id_of(stop) for stop in stops}
    ids = {id_ for id_ in known.values() if id_ is not None and codec.is_special(id_)}
    words = [tuple(codec.encode(stop, add_special=False)) for stop, id_ in known.items() if id_ is None or id_ != end]
    return Ends(end, frozenset(ids | {end} if end is not None else ids), tuple(word for word in words if word))


def retention_fields(hints: RetentionSpec | None) -> dict[str, Any]:
    """Values for the contract's fields: the prompt is one range without an end, and -1 ms is no limit."""
    fields: dict[str, Any] = {}
    if hints is None:
        return fields
    duration_ms = min(int(seconds(hints.duration) * 1000), 2**31 - 1) if hints.duration is not None else -1
    if hints.prompt is not None:
        values = (0, -1, hints.prompt, duration_ms)
        fields |= {f"retention_{name}": value for name, value in zip(RETENTION[:4], values, strict=True)}
    if hints.decode is not None:
        fields["retention_decode_priority"] = hints.decode
        if duration_ms >= 0:
            fields["retention_decode_duration_ms"] = duration_ms
    return fields


def stop_words(words: tuple[tuple[int, ...], ...]) -> tuple[list[int], list[int]]:
    """The two rows of a stop words tensor."""
    ids: list[int] = []
    offsets: list[int] = []
    for word in words:
        ids += word
        offsets.append(len(ids))
    return ids, offsets + [-1] * (len(ids) - len(offsets))
