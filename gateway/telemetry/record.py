"""What is written down of one request, from its head, for those who want to know of it when it has ended."""

import re
from collections.abc import Mapping

_AGENT_CHARACTERS = 200
_PATH_CHARACTERS = 200
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})(?P<trace>[0-9a-f]{32})-(?!0{16})(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(-.*)?"
)
"""W3C Trace Context, section 3.2; what a later version adds comes behind."""


class Record:
    """One request. Exchanges have one only where somebody wants to know."""

    __slots__ = ("client", "code", "method", "path", "request_id", "rpc", "trace_id", "user_agent")

    def __init__(
        self,
        request_id: str,
        method: str,
        path: str,
        headers: Mapping[str, str],
        client: str,
        *,
        rpc: bool = False,
    ) -> None:
        """`headers` by their names in lower case, `client` is the address that it came from. The path of an `rpc` is
        its name."""
        self.rpc = rpc
        self.request_id = request_id
        self.method = method
        self.path = path[:_PATH_CHARACTERS]
        self.client = client
        self.user_agent = headers.get("user-agent", "")[:_AGENT_CHARACTERS]
        self.code = ""
        """Of the error that the gateway told the client; empty if it told of none."""
        parent = read_traceparent(headers.get("traceparent", ""))
        self.trace_id = parent["trace"] if parent is not None else ""
        """Of the trace that the request belongs to; empty for none."""


def read_traceparent(value: str) -> re.Match[str] | None:
    """The parts of a header `traceparent`, `trace`, `span` and `flags`; None if it is not one."""
    return _TRACEPARENT.fullmatch(value)
