"""`headrace keys`: what is made can be used, and a key is shown once."""

import re

import pytest
import yaml
from typer.testing import CliRunner

from headrace.cli.keys import keys_app
from router.spec.strict import read_fleet
from router.tenants import digest_of


def test_a_new_key_is_told_once_and_its_line_fits_into_a_file() -> None:
    result = CliRunner().invoke(keys_app, ["new", "search", "--name", "7", "--expires", "2027-01-31"])
    key = result.stdout.strip()
    assert re.fullmatch(r"hr-[A-Za-z0-9_-]{43}", key)
    assert key not in result.stderr
    (line,) = re.findall(r"^  - (\{.*\})$", result.stderr, re.MULTILINE)
    reading = read_fleet(f"fleet: f\ntenants:\n  search:\n    keys:\n      - {line}\n")
    assert reading.problems == []
    assert reading.fleet is not None
    (spec,) = reading.fleet.tenants["search"].keys
    assert (bytes.fromhex(spec.sha256), spec.name, spec.expires) == (digest_of(key), "7", "2027-01-31")


@pytest.mark.parametrize("arguments", [["new", "search"], ["hash"]])
def test_a_last_day_that_is_over_gets_a_warning(arguments: list[str]) -> None:
    past = CliRunner().invoke(keys_app, [*arguments, "--expires", "2020-01-31"], input="hr-0123456789abcdefghij\n")
    assert (past.exit_code, "2020-01-31 is over" in past.stderr) == (0, True)
    future = CliRunner().invoke(keys_app, [*arguments, "--expires", "2999-01-31"], input="hr-0123456789abcdefghij\n")
    assert "is over" not in future.stderr


def test_two_new_keys_differ() -> None:
    made = {CliRunner().invoke(keys_app, ["new", "search"]).stdout for _ in range(20)}
    assert len(made) == 20


def test_a_key_that_there_is_gets_its_hash_and_a_short_one_a_warning() -> None:
    result = CliRunner().invoke(keys_app, ["hash"], input="hr-0123456789abcdefghij\n")
    assert yaml.safe_load(result.stdout) == {"sha256": digest_of("hr-0123456789abcdefghij").hex()}
    assert result.stderr == ""
    assert "can be found from its hash" in CliRunner().invoke(keys_app, ["hash"], input="sesame\n").stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["new", "a b"], "TENANT: 'a b' is not a name"),
        (["new", "t", "--expires", "soon"], "--expires: 'soon' is not a day"),
        (["new", "t", "--name", ""], "--name: '' is not a name"),
        (["hash"], "no key on standard input"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(keys_app, arguments, input="")
    assert (result.exit_code, result.stdout) == (1, "")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
