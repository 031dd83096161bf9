"""Environment variables that override a fleet file: the only place that reads them.

They exist for what differs between two gateways of one fleet (addresses, the Redis of this cluster) and for what does
not belong in a file (the admin token). Each is held to the same rules as its place in the file, and a `HEADRACE_` name
that means nothing is pointed out: a misspelt override is otherwise silently without effect. No message repeats the
value of a variable that can hold a secret.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from msgspec import structs

from gateway.configuration import MASK, Setting
from gateway.log_levels import LogLevel
from router.spec.fleet import FleetSpec, RedisSpec
from router.spec.gateway import GatewaySpec
from router.spec.references import listeners
from router.spec.strict import Problem
from router.spec.wording import choice_fault, did_you_mean, pattern_of, text_fault

LogFormat = Literal["text", "json"]

ADDRESSES = {"http": "HEADRACE_HTTP", "grpc": "HEADRACE_GRPC", "admin": "HEADRACE_ADMIN_LISTEN"}
"""The variable of each listening address of `GatewaySpec`."""
_REDIS_URL = "HEADRACE_REDIS_URL"
_ADMIN_TOKEN = "HEADRACE_ADMIN_TOKEN"
_LOG_LEVEL = "HEADRACE_LOG_LEVEL"
_LOG_FORMAT = "HEADRACE_LOG_FORMAT"

VARIABLES = (_REDIS_URL, *ADDRESSES.values(), _ADMIN_TOKEN, _LOG_LEVEL, _LOG_FORMAT)
"""Every variable that is read here."""

_OF_COMMANDS = ("HEADRACE_ADMIN", "HEADRACE_ADMIN_CA", "HEADRACE_ADMIN_CERT", "HEADRACE_CONFIG")
"""Of commands, not of the fleet: how the admin API is called, and the file's path. The command line reads them."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment says; None where it says nothing."""

    redis_url: str | None = field(default=None, repr=False)
    listen: Mapping[str, str] = field(default_factory=dict)
    """Listening addresses by field of `GatewaySpec`."""
    admin_token: str | None = field(default=None, repr=False)
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
    given: frozenset[str] = frozenset()
    """The variables that say something."""

    def applied_to(self, fleet: FleetSpec) -> FleetSpec:
        """The fleet with this process's addresses."""
        redis = RedisSpec(url=self.redis_url) if self.redis_url is not None else fleet.redis
        return structs.replace(fleet, redis=redis, gateway=structs.replace(fleet.gateway, **self.listen))

    def origins(self) -> dict[str, str]:
        """By path in the fleet file, the variable that says something else."""
        said = {f"gateway.{field_}": ADDRESSES[field_] for field_ in self.listen}
        return said | ({"redis.url": _REDIS_URL} if self.redis_url is not None else {})

    def shown(self) -> tuple[Setting, ...]:
        """What is in no fleet file, as it may be shown."""

        def setting(path: str, value: str | None, variable: str) -> Setting:
            if variable in self.given:
                return Setting(path=path, value=value, origin="environment", where=variable)
            return Setting(path=path, value=value, origin="default")

        return (
            setting("admin_token", MASK if self.admin_token is not None else None, _ADMIN_TOKEN),
            setting("log_level", self.log_level, _LOG_LEVEL),
            setting("log_format", self.log_format, _LOG_FORMAT),
        )

    def clashes(self, gateway: GatewaySpec) -> list[Problem]:
        """Overridden listening addresses that exclude one another or one of the file's."""
        if not self.listen:
            return []
        overrides = ", ".join(variable for field_, variable in ADDRESSES.items() if field_ in self.listen)
        return [Problem(overrides, f"`{one.path[-1]}` {one.message}") for one in listeners(gateway)]


def read_settings(environ: Mapping[str, str]) -> tuple[Settings, list[Problem], list[Problem]]:
    """The settings in `environ`, the problems with them, and warnings."""
    problems: list[Problem] = []

    def checked(name: str, fault: str | None) -> str | None:
        value = environ.get(name)
        if value == "":
            fault = "is empty; give it a value or unset it"
        if value is None or fault is None:
            return value
        problems.append(Problem(name, fault))
        return None

    def text(name: str, struct: type, field_: str) -> str | None:
        return checked(name, text_fault(environ.get(name, ""), pattern_of(struct.__annotations__[field_])))

    listen = {field_: text(variable, GatewaySpec, field_) for field_, variable in ADDRESSES.items()}
    redis_url = text(_REDIS_URL, RedisSpec, "url")
    token = environ.get(_ADMIN_TOKEN, "")
    # A token travels in a header: anything else could never be sent.
    sendable = all("!" <= character <= "~" for character in token)
    admin_token = checked(_ADMIN_TOKEN, None if sendable else "may hold visible ASCII characters only, no spaces")
    level = checked(_LOG_LEVEL, choice_fault(environ.get(_LOG_LEVEL), get_args(LogLevel)))
    format_ = checked(_LOG_FORMAT, choice_fault(environ.get(_LOG_FORMAT), get_args(LogFormat)))
    settings = Settings(
        redis_url=redis_url,
        listen={field_: address for field_, address in listen.items() if address is not None},
        admin_token=admin_token,
        log_level=next((one for one in get_args(LogLevel) if one == level), "info"),
        log_format=next((one for one in get_args(LogFormat) if one == format_), "text"),
        given=frozenset(name for name in VARIABLES if name in environ),
    )
    warnings = [
        Problem(name, f"is not a variable headrace knows{did_you_mean(name, VARIABLES, prefix='HEADRACE_')}")
        for name in sorted(environ)
        if name.startswith("HEADRACE_") and name not in (*VARIABLES, *_OF_COMMANDS)
    ]
    return settings, problems, warnings
