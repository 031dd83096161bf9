"""What the commands say of themselves."""

from importlib.metadata import version

import pytest
from typer.testing import CliRunner

from gateway.relay.steady import COMPILED
from headrace.cli.main import app
from headrace.settings import VARIABLES


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_version_is_that_of_the_distribution_and_tells_whether_the_relay_is_compiled() -> None:
    relay = "compiled" if COMPILED else "pure Python, slower"
    assert run("--version") == f"headrace {version('headrace')} (relay: {relay})\n"


@pytest.mark.parametrize(
    "command",
    [
        "",
        "up",
        "gateway",
        "discovery",
        "reload",
        "check",
        "schema",
        "endpoints",
        "endpoints list",
        "endpoints add",
        "routes",
        "routes set",
        "config",
        "requests",
        "requests list",
        "log-level",
        "log-level set",
        "tenants",
        "tenants set",
        "keys",
        "keys new",
    ],
)
def test_every_command_explains_itself_in_short_and_in_long_and_offers_no_completion(command: str) -> None:
    text = run(*command.split(), "-h")
    assert text == run(*command.split(), "--help")
    assert "Usage:" in text
    assert "completion" not in text


def test_the_gateway_names_its_variables_ports_and_signals() -> None:
    text = run("gateway", "-h")
    assert all(word in text for word in (*VARIABLES, ":8000", "9090", "SIGTERM", "SIGINT", "SIGHUP"))
