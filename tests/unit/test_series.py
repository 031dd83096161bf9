"""What several processes count adds up to what one would have counted."""

from collections.abc import Callable

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from gateway.metrics import Metrics
from gateway.series import Examples, Rows

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


def exposed(metrics: Metrics, encode: Callable[[CollectorRegistry], bytes] = generate_latest) -> list[bytes]:
    registry = CollectorRegistry()
    registry.register(metrics)
    return sorted(encode(registry).splitlines())


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


def test_a_bucket_shows_the_trace_of_the_latest_of_all_processes_and_only_as_openmetrics() -> None:
    processes = [Metrics() for _ in range(3)]
    for metrics, seconds, trace_id in zip(processes, (3.0, 4.0, 70.0), ("aa", "bb", "cc"), strict=True):
        metrics.answered("completions", "m", 200, seconds, None)
        metrics.exemplify("completions", "m", seconds, None, trace_id)
    for order in (processes, processes[::-1]):
        total = Metrics()
        for metrics in order:
            total.add(metrics.rows())
            travelled = msgspec.msgpack.encode(metrics.examples())
            total.add_examples(msgspec.msgpack.decode(travelled, type=dict[str, Examples]))
        shown = [line for line in exposed(total, openmetrics.generate_latest) if b" # " in line]
        five, hundred_twenty = sorted(shown, key=lambda line: b'le="5.0"' not in line)
        assert b',le="5.0",route="m"} 2.0 # {trace_id="bb"} 4.0 ' in five
        assert b',le="120.0",route="m"} 3.0 # {trace_id="cc"} 70.0 ' in hundred_twenty
        assert not [line for line in exposed(total) if b"trace_id" in line]
