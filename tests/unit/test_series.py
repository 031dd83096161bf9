"""What several processes count adds up to what one would have counted."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from gateway.metrics import Metrics
from gateway.series import Rows

ANSWERS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["r1", "r2"]),
        st.sampled_from([200, 499]),
        st.integers(0, 400),
        st.none() | st.integers(0, 400),
    ),
    max_size=30,
)


def exposed(metrics: Metrics) -> list[bytes]:
    registry = CollectorRegistry()
    registry.register(metrics)
    return sorted(generate_latest(registry).splitlines())


@given(ANSWERS)
def test_what_several_processes_counted_adds_up_to_the_whole(
    answers: list[tuple[int, str, int, int, int | None]],
) -> None:
    whole, processes = Metrics(), [Metrics() for _ in range(3)]
    for process, route, status, seconds, ttft in answers:
        for metrics in (whole, processes[process]):
            metrics.answered("completions", route, status, seconds, ttft)
            metrics.attempts.values["e", "home"] += 1
    total = Metrics()
    for metrics in processes:
        total.add(msgspec.msgpack.decode(msgspec.msgpack.encode(metrics.rows()), type=dict[str, Rows]))
    assert exposed(total) == exposed(whole)
