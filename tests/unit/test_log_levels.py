"""What loggers say can be changed while the gateway runs, and only that of loggers there are."""

import logging
from collections.abc import Iterator

import pytest

import gateway.admin.app
from gateway.log_levels import AUDIT, LogLevels, check_logger
from router.errors import ApiError

LOGGER = "gateway.upstream"


@pytest.fixture
def levels() -> Iterator[LogLevels]:
    levels = LogLevels()
    yield levels
    for name in tuple(levels.changed):
        levels.set_or_reset(name, None)


def test_a_level_is_that_of_all_in_a_package_until_it_is_taken_back(levels: LogLevels) -> None:
    before = logging.getLogger(LOGGER + ".http_call").getEffectiveLevel()
    levels.set_or_reset(LOGGER, "error")
    levels.set_or_reset(LOGGER, "debug")
    assert logging.getLogger(LOGGER + ".http_call").getEffectiveLevel() == logging.DEBUG
    assert [(row.level, row.changed) for row in levels.rows() if row.name == LOGGER] == [("debug", True)]
    levels.set_or_reset(LOGGER, None)
    assert logging.getLogger(LOGGER + ".http_call").getEffectiveLevel() == before
    assert LOGGER not in {row.name for row in levels.rows()}


def test_the_root_has_the_level_of_the_start_again_when_it_is_taken_back(levels: LogLevels) -> None:
    before = logging.getLogger().level
    levels.set_or_reset("root", "error")
    assert (levels.rows()[0].name, levels.rows()[0].level) == ("root", "error")
    levels.set_or_reset("root", None)
    assert logging.getLogger().level == before
    levels.set_or_reset("root", None)  # saying it twice is no error


def test_who_changed_what_is_told_whatever_the_others_say(levels: LogLevels) -> None:
    levels.set_or_reset("root", "error")
    levels.set_or_reset("gateway", "error")
    assert gateway.admin.app.logger.isEnabledFor(logging.INFO)
    with pytest.raises(ApiError, match="always does") as refused:
        check_logger(AUDIT)
    assert refused.value.status == 409


@pytest.mark.parametrize("name", ["gateway.http.front", "headrace.workers", "router.plan", "k8s", "asyncio", "root"])
def test_modules_packages_and_libraries_are_loggers_loaded_or_not(levels: LogLevels, name: str) -> None:
    check_logger(name)
    levels.set_or_reset(name, "warning")
    assert levels.changed == {name: "warning"}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gatway", "There is no logger 'gatway'; did you mean gateway?"),
        ("no.such.thing", "There is no logger 'no.such.thing'. It has the name of a module,"),
        ("", "There is no logger ''."),
        ("x" * 10_000, "There is no logger 'xxx"),
    ],
)
def test_a_name_that_is_no_loggers_is_refused_and_makes_none(name: str, said: str) -> None:
    with pytest.raises(ApiError) as refused:
        check_logger(name)
    assert (refused.value.status, refused.value.message.startswith(said)) == (404, True), refused.value.message
    assert len(refused.value.message) < 400
    assert name not in logging.root.manager.loggerDict
