"""Which headrace this is."""

from importlib.metadata import version


def headrace_version() -> str:
    """The version of the installed distribution, and whether its relay was compiled when it was installed."""
    from gateway.relay.steady import COMPILED  # not for commands that never ask

    return f"{version('headrace')} (relay: {'compiled' if COMPILED else 'pure Python, slower'})"
