"""`headrace bench admission` and `headrace bench fairness`: real gateways, rounds as small as they can be."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from headrace.bench.admission import comparison, fairness
from headrace.bench.admission.comparison import DIFFERENCES, FIGURES, RATIOS, Sizes, compare, needed
from headrace.bench.admission.fairness import NINE, QUICK, arrivals
from headrace.bench.admission.fronts import ALL, FRONTS, LIMITS, OFF, OIDC
from headrace.bench.relay.programs import compile_programs, find_compiler
from headrace.local.run_dir import RunDir

ERR = Console(file=io.StringIO())
WHOLE = "cpu_admission_vs_off"
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C compiler: the engine cannot be built")


@needs_compiler
async def test_every_request_of_a_comparison_comes_in_with_keys_tokens_limits_and_a_queue(tmp_path: Path) -> None:
    asked = frozenset({WHOLE, "us_oidc_cached"})
    with RunDir(tmp_path) as run:
        measured = await compare(asked, Sizes(rounds=1, cost_s=0.1), run, await compile_programs(run), ERR)
    assert asked <= {name for name, numbers in measured.rounds.items() if len(numbers) == 1}
    assert measured.rounds[WHOLE][0] > 0


@needs_compiler
async def test_nine_tenants_are_seen_alone_and_beside_a_greedy_one(tmp_path: Path) -> None:
    sizes = replace(QUICK, repetitions=1, service_s=0.1, seconds=2.0, warm_up_s=0.2)
    with RunDir(tmp_path) as run:
        measured = await fairness.compare(sizes, run, await compile_programs(run), ERR)
    assert {name for name, numbers in measured.rounds.items() if len(numbers) == 1} == {
        figure.name for figure in fairness.FIGURES
    }
    assert measured.rounds["nine_goodput_vs_alone"][0] > 0
    assert measured.rounds["greedy_part_of_slots"][0] > 0


def test_only_the_gateways_are_started_that_a_figure_needs() -> None:
    assert needed(frozenset({WHOLE})) == [OFF, ALL]
    assert needed(frozenset({"cpu_keys_and_limits_vs_off"})) == [OFF, LIMITS]
    assert needed(frozenset({"us_off"})) == [OFF]
    assert needed(frozenset({"us_oidc_cached"})) == [OFF, OIDC]
    assert needed(frozenset(figure.name for figure in FIGURES)) == list(FRONTS)
    assert {above for _, above, _ in (*RATIOS, *DIFFERENCES)} | {OFF} == set(FRONTS)


@given(st.text(max_size=5), st.sampled_from(NINE), st.floats(0.1, 50))
def test_the_same_requests_come_alone_and_beside(seed: str, tenant: str, rate: float) -> None:
    times = arrivals(f"{seed} {tenant}", rate, 10.0)
    assert times == arrivals(f"{seed} {tenant}", rate, 10.0) == sorted(times)
    assert all(0 < at < 10.0 for at in times)


def test_a_quick_run_is_as_the_full_one_but_for_its_size() -> None:
    assert comparison.QUICK.rounds < comparison.FULL.rounds
    assert fairness.QUICK.rounds < fairness.FULL.rounds
