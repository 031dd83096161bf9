"""Which headrace this is."""

from importlib.metadata import version


def headrace_version() -> str:
    """The version of the installed distribution."""
    return version("headrace")
