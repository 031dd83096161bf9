"""`headrace check` and `headrace schema`, as a shell sees them."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from headrace.cli.check import check
from headrace.cli.schema import schema

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "fleet.yaml"

app = typer.Typer()
app.command()(check)
app.command()(schema)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout


def test_a_correct_file_gets_one_line() -> None:
    assert run("check", str(EXAMPLE)) == (0, f"{EXAMPLE}: fleet demo: 2 pools, 3 endpoints, 2 routes, 0 tenants\n")


def test_a_mistake_is_printed_with_file_line_and_path(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("fleet: demo\nrouts: {}\ngateway: {body_limit: 5}\n")
    code, output = run("check", str(file))
    assert code == 1
    assert output.splitlines() == [
        f"{file}:2:1: routs: unknown key; did you mean routes?",
        f"{file}:3:23: gateway.body_limit: a size needs its unit: write 5B, or use KiB, MiB, GiB",
    ]


def test_a_missing_file_is_one_sentence_and_exit_1(tmp_path: Path) -> None:
    assert run("check", str(tmp_path / "none.yaml")) == (1, f"{tmp_path / 'none.yaml'}: no such file\n")


def test_a_file_can_come_from_standard_input() -> None:
    result = CliRunner().invoke(app, ["check", "-"], input="fleet: demo\nrouts: {}\n")
    assert (result.exit_code, result.stdout) == (1, "-:2:1: routs: unknown key; did you mean routes?\n")


def test_a_warning_does_not_fail_the_check(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("fleet: demo\ngateway: {auth: {anonymous: allow}}\n")
    code, output = run("check", str(file))
    assert code == 0
    assert output.splitlines() == [
        f"{file}:1:1: no routes: nothing is served until one is set from elsewhere (warning)",
        f"{file}: fleet demo: 0 pools, 0 endpoints, 0 routes, 0 tenants",
    ]


def test_a_key_whose_last_day_is_over_gets_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    keys = "\n".join(f"    - {{sha256: '{day:064d}', expires: {day}-01-31}}" for day in (2020, 2999))
    file.write_text(f"fleet: demo\ntenants:\n  t:\n    keys:\n{keys}\n")
    code, output = run("check", str(file))
    assert code == 0
    assert [line for line in output.splitlines() if "expires" in line] == [
        f"{file}:5:84: tenants.t.keys[0].expires: the key is not taken any more: its last day was 2020-01-31 (warning)"
    ]


def test_mistakes_in_the_file_do_not_hide_those_of_the_files_it_names(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    (tmp_path / "chat.jinja").write_text("{% if %}")
    file.write_text(
        "fleet: demo\nrouts: {}\npools:\n"
        "  a: {protocol: triton, model: m, chat_template: {file: chat.jinja}}\n"
        "  b: {protocol: triton, model: m, tokenizer: {file: none.json}}\n"
    )
    code, output = run("check", str(file))
    assert code == 1
    lines = output.splitlines()
    assert [line.split(": ")[1] for line in lines] == ["routs", "pools.a.chat_template", "pools.b.tokenizer.file"]


def test_json_is_one_object_either_way(tmp_path: Path) -> None:
    code, output = run("check", "--json", str(EXAMPLE))
    report = json.loads(output)
    assert code == 0
    assert (report["ok"], report["fleet"], report["pools"], report["endpoints"]) == (True, "demo", 2, 3)
    file = tmp_path / "fleet.yaml"
    file.write_text("fleet: demo\nrouts: {}\n")
    code, output = run("check", str(file), "--json")
    report = json.loads(output)
    assert code == 1
    assert report["errors"] == [
        {"path": "routs", "message": "unknown key; did you mean routes?", "line": 2, "column": 1, "file": None}
    ]
    report = json.loads(run("check", str(tmp_path / "none.yaml"), "--json")[1])
    assert report["errors"] == [{"path": "", "message": "no such file", "line": None, "column": None, "file": None}]


def test_the_check_does_not_depend_on_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HTTP", "nonsense")
    assert run("check", str(EXAMPLE))[0] == 0


def test_the_schema_is_printed_as_docs_hold_it() -> None:
    assert run("schema") == (0, (ROOT / "docs" / "fleet.schema.json").read_text())
