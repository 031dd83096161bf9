"""The configuration in force says of each value where it comes from, and of no secret what it is."""

from typing import Any

import msgspec
import pytest

from gateway.configuration import SHOWN_CHARACTERS, InForce, Origins, Setting, SettingFilter, list_settings, masked
from router.merge import merge
from router.spec.documents import Document, Family, Source, file_documents
from router.spec.fleet import FleetSpec
from router.spec.gateway import GatewaySpec

FILE = {
    "fleet": "demo",
    "redis": {"url": "redis://user:hunter2@127.0.0.1:6379"},
    "pools": {
        "p": {
            "protocol": "openai",
            "model": "m",
            "ping": "15s",
            "timeouts": {"idle": "5s"},
            "endpoints": [{"id": "a", "http": "http://127.0.0.1:1"}],
        }
    },
    "routes": {"r": {"pool": "p"}, "v1.5": {"pool": "p"}},
    "gateway": {"admin": "127.0.0.1:1", "overload": {"cpu": "98%"}},
}
SPEC = msgspec.convert(FILE, FleetSpec)
GIVEN = frozenset({"redis", "redis.url", "gateway.admin", "gateway.overload", "gateway.overload.cpu", "pools.p.ping"})
OWN = Origins(
    file="/etc/fleet.yaml", content_hash="mine", given=GIVEN, variables={"gateway.http": "HEADRACE_HTTP"}
)  # fmt: skip


def document(family: Family, id_: str, source: Source, spec: dict[str, Any]) -> Document:
    return Document(family=family, id=id_, source=source, generation=1, spec=msgspec.Raw(msgspec.json.encode(spec)))


def listed(*more: Document, content_hash: str = "mine", **wanted: Any) -> dict[str, Setting]:
    documents = [*file_documents(SPEC, content_hash=content_hash), *more]
    in_force = InForce(SPEC, OWN, merge(documents), documents, {"gateway.http": "debug"})
    found = list_settings(in_force, SettingFilter(**wanted), []).settings
    assert len({one.path for one in found}) == len(found)
    return {one.path: one for one in found}


def origin(one: Setting) -> tuple[Any, str, str | None]:
    return one.value, one.origin, one.where


def test_every_value_of_the_gateway_is_there_with_its_origin() -> None:
    settings = listed()
    assert origin(settings["gateway.http"]) == (":8000", "environment", "HEADRACE_HTTP")
    assert origin(settings["gateway.admin"]) == ("127.0.0.1:1", "file", "/etc/fleet.yaml")
    assert origin(settings["gateway.overload.cpu"]) == ("98%", "file", "/etc/fleet.yaml"), "said, be it the default"
    assert origin(settings["gateway.overload.memory"]) == ("90%", "default", None)
    assert origin(settings["gateway.tls"]) == (None, "default", None)
    assert origin(settings['log_levels["gateway.http"]']) == ("debug", "admin", None)
    assert {path.split(".")[1] for path in settings if path.startswith("gateway.")} == set(
        GatewaySpec.__struct_fields__
    )


def test_values_of_the_fleet_come_from_the_strongest_document_that_has_their_field() -> None:
    settings = listed(
        document("endpoints", "a", "cli", {"drain": True}),
        document("pools", "p", "operator", {"timeouts": {"total": "9s"}, "ping": "1s"}),
        document("routes", "new", "cli", {"pool": "p"}),
    )
    assert origin(settings["endpoints.a.drain"]) == (True, "document", "cli")
    assert origin(settings["endpoints.a.http"]) == ("http://127.0.0.1:1", "file", "/etc/fleet.yaml")
    assert origin(settings["endpoints.a.tp"]) == (1, "default", None)
    assert origin(settings["pools.p.timeouts.total"]) == ("9s", "document", "operator")
    assert origin(settings["pools.p.timeouts.idle"]) == ("60s", "default", None), "a field is replaced whole"
    assert origin(settings["pools.p.ping"]) == ("1s", "document", "operator")
    assert origin(settings["routes.new.pool"]) == ("p", "document", "cli")
    assert origin(settings['routes["v1.5"].pool']) == ("p", "file", "/etc/fleet.yaml")


def test_another_gateways_file_is_a_document_and_not_the_own_file() -> None:
    settings = listed(content_hash="other")
    assert origin(settings["routes.r.pool"]) == ("p", "document", "file")
    assert origin(settings["gateway.admin"]) == ("127.0.0.1:1", "file", "/etc/fleet.yaml")


def test_filters_leave_out_what_is_not_wanted_and_the_limit_is_told() -> None:
    assert set(listed(prefix="gateway.overload.")) == {
        f"gateway.overload.{name}" for name in ("loop_lag", "memory", "files", "cpu")
    }
    assert {path.split(".")[0] for path in listed(prefix="routes")} == {"routes", 'routes["v1'}
    assert all(one.origin != "default" for one in listed(defaults=False).values())
    documents = file_documents(SPEC, content_hash="mine")
    cut = list_settings(InForce(SPEC, OWN, merge(documents), documents, {}), SettingFilter(limit=2), [])
    assert (len(cut.settings), cut.matching > 50) == (2, True)


def test_no_password_is_shown() -> None:
    assert listed()["redis.url"].value == "redis://***@127.0.0.1:6379"
    assert "hunter2" not in str(listed())


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("http://u:p@h:1/x", "http://***@h:1/x"),
        ("rediss://:p%40@h", "rediss://***@h"),
        ("redis://u:a/b@h", "redis://***@h"),
        ("redis://u:a@b:1@h:6379", "redis://***@h:6379"),
        ("unix://u:a@b@/run/redis", "unix://***@/run/redis"),
        ("https://u@h/keys?key=secret&a=b", "https://***@h/keys?***"),
        ("me@example", "me@example"),
        (["http://u:p@h", 1], ["http://***@h", 1]),
        ({"a": {"b": "http://u:p@h"}}, {"a": {"b": "http://***@h"}}),
        ("x" * SHOWN_CHARACTERS + "yz", "x" * SHOWN_CHARACTERS + "... (2 characters more)"),
        (None, None),
    ],
)
def test_what_is_shown_of_a_value(value: object, shown: object) -> None:
    assert masked(value) == shown


def test_after_a_reload_what_stays_keeps_its_origin_and_the_rest_has_the_new_files() -> None:
    again = OWN.reread({"gateway.drain.grace", "gateway.http", "routes.r.pool"}, "new", ("http", "admin"))
    assert again.given == {"redis", "redis.url", "gateway.admin", "gateway.drain.grace", "routes.r.pool"}
    assert (again.content_hash, again.file) == ("new", "/etc/fleet.yaml")
