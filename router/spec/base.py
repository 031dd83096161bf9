"""What the types of a fleet file have in common.

They are tolerant on purpose: decoding ignores keys it does not know, so that during a rollout an old gateway can read
what a new one published. Files written by people are read strictly instead (`router.spec.strict`), because there an
unknown key is a typing mistake.
"""

from typing import Annotated

from msgspec import Meta, Struct

PositiveInt = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]


class Spec(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of the types of a fleet file: immutable, written without the fields left at their default."""
