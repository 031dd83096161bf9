"""The benches there are. Each is imported when it runs, so that one bench does not need what another one needs."""

import importlib
from collections.abc import Awaitable, Sequence
from typing import Protocol, cast

from rich.console import Console

from headrace.bench.figures import BenchError, Figure, Measured, Plan

_MODULES = {
    "grpc": "headrace.bench.kserve.comparison",
    "relay": "headrace.bench.relay.comparison",
    "admission": "headrace.bench.admission.comparison",
    "fairness": "headrace.bench.admission.fairness",
}

NAMES = tuple(_MODULES)


class Bench(Protocol):
    """What a bench's module has."""

    FIGURES: Sequence[Figure]

    def measure(self, plan: Plan, err: Console) -> Awaitable[Measured]:
        """Run everything that `plan.figures` needs; progress goes to `err`. Cancelled, it leaves nothing running.

        Raises:
            BenchError, LocalFleetError: a side could not be started or did not answer as it should.
        """
        ...


def find_bench(name: str) -> Bench:
    """The bench called `name`.

    Raises:
        BenchError: there is none, or a package that only benches need is missing.
    """
    if name not in _MODULES:
        raise BenchError(f"no bench {name!r}: choose from {', '.join(NAMES)}")
    try:
        return cast("Bench", importlib.import_module(_MODULES[name]))
    except ModuleNotFoundError as error:
        if error.name != "psutil":
            raise
        raise BenchError("benches measure CPU time with psutil, which is missing: pip install psutil") from None
