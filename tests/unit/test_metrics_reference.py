"""The page about the metrics says what there is."""

from pathlib import Path

from headrace.metrics_reference import page

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_page_about_metrics_is_that_of_the_families_there_are() -> None:
    assert PAGE.read_text() == page(), "run `make metrics`"


def test_the_page_names_workers_overload_and_the_fleets_families() -> None:
    told = page()
    for name in (
        *("headrace_requests_total", "headrace_overload_seconds_total", "headrace_endpoint_phase"),
        *("headrace_redis_connected", "headrace_workers_serving", "process_resident_memory_bytes"),
    ):
        assert f"| `{name}` |" in told
