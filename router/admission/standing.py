"""How a request stands among those that wait: what its tenant is, and what it asks for itself.

A request may stand back (`x-headrace-priority`, a lower class than its tenant's) and may say that it would rather be
refused than wait (`Prefer: if-available`, a header of RFC 7240's kind). It can never push forward, so neither has to be
trusted.
"""

from typing import Final

import msgspec

from router.admission.tickets import PRIORITIES
from router.errors import invalid
from router.spec.fleet import Priority

PRIORITY_HEADER: Final = "x-headrace-priority"
PREFER_HEADER: Final = "prefer"
_IF_AVAILABLE = "if-available"


class Standing(msgspec.Struct, frozen=True):
    """Who waits, and how. The default is anybody without a key: they are one tenant together."""

    tenant: str = ""
    weight: float = 1.0
    priority: Priority = "standard"
    if_available: bool = False

    def asking(self, priority: str | None, prefer: str | None) -> "Standing":
        """What comes of it by the headers of a request. Raises a 400 ApiError for a class that there is not."""
        if priority is None and prefer is None:
            return self
        rank = PRIORITIES.index(self.priority)
        if priority is not None:
            asked = priority.strip().lower()
            if asked not in PRIORITIES:
                raise invalid(
                    f"Invalid {PRIORITY_HEADER} header: write one of {', '.join(PRIORITIES)}.", code="invalid_header"
                )
            rank = max(rank, PRIORITIES.index(asked))
        if_available = prefer is not None and any(
            one.partition(";")[0].strip().lower() == _IF_AVAILABLE for one in prefer.split(",")
        )
        return Standing(self.tenant, self.weight, PRIORITIES[rank], if_available)
