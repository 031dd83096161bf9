"""Ids of requests: which of clients' own are taken, and those made for requests that bring none, which are unique among
gateways and made by counting."""

import itertools
import os
import re

_PREFIX = os.urandom(8).hex()
_NUMBERS = itertools.count()
_ACCEPTED = re.compile(r"[\x21-\x7e]{1,128}")


def new_request_id() -> str:
    """32 hexadecimal digits."""
    return f"{_PREFIX}{next(_NUMBERS):016x}"


def is_request_id(given: str) -> bool:
    """Whether a client's id is taken: it goes into headers and log lines."""
    return _ACCEPTED.fullmatch(given) is not None
