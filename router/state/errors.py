"""What can go wrong when the shared state is written.

Each carries one sentence for people. Reading never raises: a gateway goes on with the documents it knows.
"""


class StateError(Exception):
    """A write to the shared state that was not done."""


class StateUnavailable(StateError):  # noqa: N818 - a condition of the shared state, not of the program
    """Redis cannot be reached, is not configured, or refuses the write. Trying again later may help."""


class WriteConflict(StateError):  # noqa: N818 - the same
    """Somebody else wrote the same document in the meantime; read it again before trying again."""
