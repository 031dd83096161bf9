"""Loading a fleet: template files, environment overrides, and every problem of both at once."""

# ruff: noqa: E501 (one mistake a line)

from pathlib import Path

import pytest

from headrace.config import ConfigError, LoadedFleet, load_fleet, load_pools
from headrace.settings import VARIABLES

ROOT = Path(__file__).parents[2]

FILE = """\
fleet: demo
pools:
  smollm:
    protocol: triton
    model: ensemble
    chat_template: {file: templates/t.jinja}
    endpoints: [{id: a, grpc: "h:1"}]
routes: {smollm2: {pool: smollm}}
gateway: {auth: {anonymous: allow}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "t.jinja").write_text("{{ messages }}")
    path = tmp_path / "fleet.yaml"
    path.write_text(FILE)
    return path


def refusal(path: Path, environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_fleet(path, environ or {})
    assert str(caught.value).splitlines() == [problem.render(str(path)) for problem in caught.value.problems]
    return str(caught.value).splitlines()


def edited(path: Path, old: str, new: str) -> LoadedFleet:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return load_fleet(path, {})


def test_a_template_file_is_carried_as_text(file: Path) -> None:
    template = load_fleet(file, {}).spec.pools["smollm"].chat_template
    assert template is not None
    assert (template.file, template.text) == (None, "{{ messages }}")


def test_templates_are_found_beside_the_file_wherever_it_is_loaded_from(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    assert load_fleet(file, {}).warnings == []
    monkeypatch.chdir(file.parent)
    assert load_fleet(Path("fleet.yaml"), {}).warnings == []


def test_a_missing_template_is_named_at_its_line(file: Path) -> None:
    template = file.parent / "templates" / "t.jinja"
    template.unlink()
    assert refusal(file) == [f"{file}:6:21: pools.smollm.chat_template.file: template {template}: no such file"]
    template.mkdir()
    assert refusal(file)[0].endswith("is a directory, not a file")


def test_a_template_that_is_not_text_or_huge_is_refused(file: Path) -> None:
    template = file.parent / "templates" / "t.jinja"
    template.write_bytes(b"abc\xff")
    assert refusal(file)[0].endswith("is not UTF-8 text (byte 4)")
    template.write_bytes(b"x" * (1024 * 1024 + 1))
    assert refusal(file)[0].endswith("is larger than 1048576 bytes")


def test_a_mistake_in_a_template_shows_when_the_file_is_loaded(file: Path) -> None:
    (file.parent / "templates" / "t.jinja").write_text("fine\n{% if %}")
    (line,) = refusal(file)
    assert line.startswith(f"{file}:6:5: pools.smollm.chat_template: the chat template has a mistake in line 2")


def test_a_file_that_cannot_be_read_gets_one_sentence(tmp_path: Path) -> None:
    missing = tmp_path / "none.yaml"
    assert refusal(missing) == [f"{missing}: no such file"]
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("fleet: dé".encode("latin-1"))
    assert refusal(latin) == [f"{latin}: is not UTF-8 text (byte 9)"]


def test_the_hash_follows_the_fleet_and_not_its_spelling(file: Path) -> None:
    original = load_fleet(file, {}).content_hash
    assert (
        edited(
            file, "protocol: triton\n    model: ensemble", "model: ensemble   # it\n    protocol: 'triton'"
        ).content_hash
        == original
    )
    assert edited(file, "gateway: {", "gateway: {http: ':81', ").content_hash == original
    assert load_fleet(file, {"HEADRACE_HTTP": ":82"}).content_hash == original
    assert edited(file, "ensemble", "ensemble2").content_hash != original


def test_the_hash_follows_the_template_text(file: Path) -> None:
    original = load_fleet(file, {}).content_hash
    (file.parent / "templates" / "t.jinja").write_text("other")
    assert load_fleet(file, {}).content_hash != original


def test_the_environment_overrides_addresses_and_redis(file: Path) -> None:
    loaded = load_fleet(
        file,
        {
            "HEADRACE_REDIS_URL": "redis://elsewhere:6379",
            "HEADRACE_HTTP": "127.0.0.1:1",
            "HEADRACE_GRPC": "127.0.0.1:2",
            "HEADRACE_ADMIN_LISTEN": "127.0.0.1:3",
            "HEADRACE_ADMIN_TOKEN": "sesame",
            "HEADRACE_LOG_LEVEL": "debug",
            "HEADRACE_LOG_FORMAT": "json",
        },
    )
    gateway = loaded.spec.gateway
    assert loaded.spec.redis is not None
    assert loaded.spec.redis.url == "redis://elsewhere:6379"
    assert (gateway.http, gateway.grpc, gateway.admin) == ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")
    settings = loaded.settings
    assert (settings.admin_token, settings.log_level, settings.log_format) == ("sesame", "debug", "json")
    assert loaded.warnings == []


def test_an_admin_api_open_to_other_machines_without_a_token_is_pointed_out(file: Path) -> None:
    def warned(**environ: str) -> list[str]:
        return [warning.render("f") for warning in load_fleet(file, environ).warnings]

    words = (
        "can be reached from other machines, so nobody may use the admin API without a token: set HEADRACE_ADMIN_TOKEN "
        "for the gateway"
    )
    for address in (":9090", "0.0.0.0:9090", "10.0.0.1:9090", "[::]:9090", "gateway-1:9090"):
        assert warned(HEADRACE_ADMIN_LISTEN=address) == [f"HEADRACE_ADMIN_LISTEN: {words}"]
        assert warned(HEADRACE_ADMIN_LISTEN=address, HEADRACE_ADMIN_TOKEN="sesame") == []
    for address in ("127.0.0.2:9090", "localhost:9090", "[::1]:9090"):
        assert warned(HEADRACE_ADMIN_LISTEN=address) == []
    (warning,) = edited(file, "gateway: {", "gateway: {admin: ':9090', ").warnings
    assert warning.render("f") == f"f:9:11: gateway.admin: {words}"


def test_an_empty_environment_changes_nothing(file: Path) -> None:
    loaded = load_fleet(file, {"PATH": "/bin", "HEADRACE_ADMIN": "h:1", "HEADRACE_CONFIG": "f"})
    assert loaded.spec.redis is None
    assert loaded.spec.gateway.http == ":8000"
    assert loaded.settings.admin_token is None
    assert loaded.warnings == []


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("HEADRACE_HTTP", "8000", '8000 is not an address to listen on: write ":8000" for every interface, or HOST:8000'),
        ("HEADRACE_GRPC", ":70000", "port 70000 is not between 0 and 65535"),
        ("HEADRACE_ADMIN_LISTEN", "", "is empty; give it a value or unset it"),
        ("HEADRACE_ADMIN_LISTEN", ":8000", "`admin` listens on port 8000, which `http` already takes"),
        ("HEADRACE_REDIS_URL", "http://:sesame@h", "expected a URL that starts with redis://, rediss:// or unix://"),
        ("HEADRACE_REDIS_URL", "redis://127.0.0.1:99999", "in the Redis URL, port 99999 is not between 1 and 65535"),
        ("HEADRACE_ADMIN_TOKEN", "open sesame", "may hold visible ASCII characters only, no spaces"),
        ("HEADRACE_ADMIN_TOKEN", "", "is empty; give it a value or unset it"),
        ("HEADRACE_LOG_LEVEL", "warn", "'warn' is not one of debug, info, warning, error; did you mean warning?"),
        ("HEADRACE_LOG_FORMAT", "JSON", "'JSON' is not one of text, json; did you mean json?"),
    ],
)  # fmt: skip
def test_an_override_is_held_to_the_rules_of_the_file(file: Path, variable: str, value: str, message: str) -> None:
    assert refusal(file, {variable: value}) == [f"{variable}: {message}"]


def test_an_override_that_clashes_with_the_file_is_named_whichever_side_it_is_on(file: Path) -> None:
    clash = "HEADRACE_HTTP: `admin` listens on port 9090, which `http` already takes"
    assert refusal(file, {"HEADRACE_HTTP": ":9090"}) == [clash]


def test_an_override_that_means_nothing_is_pointed_out(file: Path) -> None:
    warnings = load_fleet(file, {"HEADRACE_REDIS": "redis://:sesame@h", "HEADRACE_COLOUR": "1"}).warnings
    assert [warning.render("f") for warning in warnings] == [
        "HEADRACE_COLOUR: is not a variable headrace knows",
        "HEADRACE_REDIS: is not a variable headrace knows; did you mean HEADRACE_REDIS_URL?",
    ]


def test_problems_of_file_and_environment_come_together(file: Path) -> None:
    file.write_text(FILE.replace("smollm2:", "smollm2: &x").replace("pool: smollm}", "poll: smollm}"))
    lines = refusal(file, {"HEADRACE_LOG_LEVEL": "loud"})
    assert [line.rpartition(": ")[0] for line in lines] == [f"{file}:8:23: routes.smollm2.poll", "HEADRACE_LOG_LEVEL"]


def test_settings_do_not_show_their_secrets(file: Path) -> None:
    loaded = load_fleet(file, {"HEADRACE_ADMIN_TOKEN": "sesame", "HEADRACE_REDIS_URL": "redis://:sesame@h"})
    assert "sesame" not in repr(loaded.settings)


def test_every_variable_is_in_the_configuration_reference() -> None:
    reference = (ROOT / "docs" / "configuration.md").read_text()
    assert all(f"`{variable}`" in reference for variable in VARIABLES)


def test_the_files_of_a_folder_are_one_fleet(file: Path) -> None:
    folder = file.parent
    (folder / "tenants.yaml").write_text("---\n# by hand\ntenants:\n  search: {keys: [{sha256: " + "a" * 64 + "}]}")
    (folder / "unread.json").write_text("nonsense")
    loaded = load_fleet(folder, {})
    assert (loaded.spec.fleet, [*loaded.spec.pools], [*loaded.spec.tenants]) == ("demo", ["smollm"], ["search"])
    assert load_fleet(file, {}).content_hash != loaded.content_hash


def test_a_mistake_in_a_folder_is_told_with_its_own_file_and_line(file: Path) -> None:
    folder = file.parent
    (folder / "tenants.yaml").write_text("---\ntenants:\n  search: {prioritty: batch}\n")
    file.write_text(FILE.replace("smollm2: {pool: smollm}", "smollm2: {pool: smol}"))
    assert refusal(folder) == [
        f"{file}:8:20: routes.smollm2.pool: no pool is named smol; did you mean smollm?",
        f"{folder / 'tenants.yaml'}:3:12: tenants.search.prioritty: unknown key; did you mean priority?",
    ]


def test_what_a_folder_lacks_is_told(tmp_path: Path) -> None:
    assert refusal(tmp_path) == [f"{tmp_path}: is a folder without any *.yaml"]
    (tmp_path / "a.yaml").mkdir()
    assert refusal(tmp_path) == [f"{tmp_path}: a.yaml is a directory, not a file"]


def test_who_serves_no_pool_needs_none_of_the_files_that_pools_name(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(FILE)
    spec, settings = load_pools(file, {"HEADRACE_REDIS_URL": "redis://r:6379", "HEADRACE_LOG_LEVEL": "debug"})
    assert spec.redis is not None
    assert (spec.redis.url, settings.log_level, list(spec.pools)) == ("redis://r:6379", "debug", ["smollm"])
    for text in (FILE.replace("model: ensemble", "modle: ensemble"), FILE.replace("fleet: demo", "")):
        file.write_text(text)
        with pytest.raises(ConfigError):
            load_pools(file, {})
    with pytest.raises(ConfigError, match="no such file"):
        load_pools(tmp_path / "other.yaml", {})
