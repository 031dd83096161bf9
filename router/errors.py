"""The refusals a client may see, in the terms of the OpenAI API.

`ApiError` is raised wherever a request turns out to be unanswerable, from parsing to dispatch; the front turns it into
the wire shape of the API that was called. `message` is for people and says what to do, `code` is stable for programs.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class ApiError(Exception):
    """A refusal: HTTP `status`, OpenAI error `type`, the offending `param` where there is one, a stable `code`."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None
    """Seconds for the `Retry-After` header."""
    headers: tuple[tuple[str, str], ...] = ()
    """Further headers of the answer."""

    def __str__(self) -> str:
        return self.message


def invalid(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400 for a request that is malformed or asks for what nothing here can do."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, *, code: str = "no_capacity", retry_after: int = 1) -> ApiError:
    """A 503 for a request that would be answered if an endpoint were there to do it."""
    return ApiError(503, message, type="server_error", code=code, retry_after=retry_after)
