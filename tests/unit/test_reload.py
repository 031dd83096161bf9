"""What of a fleet file that is read again can be in force at once."""

import pytest
from msgspec import structs

from gateway.reload import ReloadError, what_can_change
from router.spec.fleet import FleetSpec, PoolSpec, RedisSpec
from router.spec.gateway import GatewaySpec

BEFORE = FleetSpec(fleet="f", gateway=GatewaySpec(http=":1", admin=":2", body_limit="1MiB"))
AFTER = FleetSpec(
    fleet="f",
    redis=RedisSpec(),
    pools={"p": PoolSpec(protocol="openai", model="m")},
    gateway=GatewaySpec(http=":9", admin=":2", body_limit="2MiB"),
)


def test_what_is_fixed_stays_and_is_named_and_everything_else_is_taken_over() -> None:
    spec, reloaded = what_can_change(BEFORE, AFTER, ("http", "admin"))
    assert reloaded.needs_restart == ["redis", "gateway.http"]
    assert spec == structs.replace(AFTER, redis=None, gateway=structs.replace(AFTER.gateway, http=":1"))


def test_the_file_of_another_fleet_is_refused() -> None:
    with pytest.raises(ReloadError, match=r"of the fleet g;.*of the fleet f"):
        what_can_change(BEFORE, structs.replace(AFTER, fleet="g"), ())
