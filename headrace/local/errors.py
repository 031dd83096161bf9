"""The one exception a user of the embedded fleet meets."""


class LocalFleetError(Exception):
    """Something the user can act on, in one sentence that says what to do.

    `exit_code` is 2 when the fleet could not be started as asked (wrong port, missing wheel, too little memory), 1 when
    something that ran has failed.
    """

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
