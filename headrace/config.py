"""Load a fleet file: the I/O around the pure reader of `router.spec.strict`.

Loading reads the file and the chat templates it names, reads the environment's overrides, and gathers every problem of
all three before it gives up, so that one start shows everything there is to mend.

Templates are put into the fleet as text: a document published in Redis must mean the same on a gateway that does not
have the file. They are compiled once here, so that a mistake in one shows now and not with the first chat request.
Tokenizers are megabytes, so those stay files, under an absolute path that every gateway must have; they are loaded here
once for the same reason.
"""

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import structs

from gateway.chat_template import compile_template
from gateway.configuration import Origins, Setting
from gateway.reload import ReloadError
from gateway.upstream.triton.token_form import end_id
from gateway.upstream.triton.tokens import TokenizerError, load_tokenizer
from headrace.fleet_text import STANDARD_INPUT, ReadError, read_fleet_text, read_text
from headrace.settings import ADDRESSES, Settings, read_settings
from router.spec.fleet import FleetSpec, PoolSpec, ReplaceSpec, SecretSpec
from router.spec.gateway import GatewaySpec
from router.spec.strict import Problem, Reading, path_text, read_fleet
from router.spec.units import has_expired, is_loopback
from router.spec.yaml_nodes import MAX_CHARACTERS

MAX_TEMPLATE_BYTES = 1024 * 1024

logger = logging.getLogger("headrace.gateway")


class ConfigError(Exception):
    """A configuration that cannot be used. The message is one line per problem."""

    def __init__(self, path: Path, problems: list[Problem]) -> None:
        super().__init__("\n".join(problem.render(str(path)) for problem in problems))
        self.path = path
        self.problems = problems


@dataclass(frozen=True, slots=True)
class LoadedFleet:
    """A fleet as this process runs it."""

    spec: FleetSpec
    """With chat templates as text and the environment's overrides applied."""
    settings: Settings
    content_hash: str
    """Equal for files that publish the same fleet, however they are written and wherever their gateways listen."""
    path: Path
    warnings: list[Problem]
    given: frozenset[str]
    """The paths of what the file says, without those of endpoints."""

    def origins(self, *process: Setting) -> Origins:
        """Where its values come from; `process` are those that the command line has said."""
        return Origins(
            file=str(self.path),
            content_hash=self.content_hash,
            given=self.given,
            variables=self.settings.origins(),
            process=(*process, *self.settings.shown()),
        )

    @property
    def size(self) -> dict[str, int]:
        """How many `pools`, `endpoints`, `routes` and `tenants` there are."""
        spec = self.spec
        endpoints = sum(len(pool.endpoints) for pool in spec.pools.values())
        counted = {"pools": len(spec.pools), "endpoints": endpoints}
        return {**counted, "routes": len(spec.routes), "tenants": len(spec.tenants)}


def size_text(size: Mapping[str, int]) -> str:
    """`2 pools, 1 endpoint, 2 routes, 0 tenants`."""
    return ", ".join(f"{count} {noun if count != 1 else noun.removesuffix('s')}" for noun, count in size.items())


def load_fleet(path: Path, environ: Mapping[str, str]) -> LoadedFleet:
    """Read the fleet file at `path`, a folder of them, or standard input where that is `-`, with the overrides in
    `environ`.

    Raises `ConfigError` with every problem of the file, its templates and the overrides.
    """
    settings, problems, warnings = read_settings(environ)
    try:
        source = read_fleet_text(path, 4 * MAX_CHARACTERS)
    except ReadError as error:
        raise ConfigError(path, [Problem("", f"{error}"), *problems]) from None
    reading = read_fleet(source.text)
    spec, template_problems = _with_templates(reading, source.folder)
    problems = [*map(source.located, (*reading.problems, *template_problems)), *problems]
    if spec is not None and not problems:
        content_hash = _content_hash(spec)
        spec = settings.applied_to(spec)
        problems = settings.clashes(spec.gateway)
        if not problems:
            found = [*reading.warnings, *_expired(reading, spec), *_open_admin(reading, spec, settings)]
            warnings = [*map(source.located, found), *warnings]
            given = frozenset(path_text(one) for one in reading.places if "endpoints" not in one[:3])
            return LoadedFleet(spec, settings, content_hash, path, warnings, given)
    raise ConfigError(path, problems)


def load_pools(path: Path, environ: Mapping[str, str]) -> tuple[FleetSpec, Settings]:
    """The fleet that the file describes, for who serves none of it: without the files that it names, which need not be
    there, but with the overrides in `environ`. Raises `ConfigError`."""
    settings, problems, _ = read_settings(environ)
    try:
        source = read_fleet_text(path, 4 * MAX_CHARACTERS)
    except ReadError as error:
        raise ConfigError(path, [Problem("", f"{error}"), *problems]) from None
    reading = read_fleet(source.text)
    problems = [*map(source.located, reading.problems), *problems]
    if reading.fleet is None or problems:
        raise ConfigError(path, problems)
    return settings.applied_to(reading.fleet), settings


def report_warnings(loaded: LoadedFleet) -> None:
    """Log what the operator should know of the file."""
    for warning in loaded.warnings:
        logger.warning("%s", warning.render(str(loaded.path)))


async def read_again(path: Path) -> tuple[FleetSpec, str, frozenset[str]]:
    """As `gateway.reload.ReadAgain`."""
    if path == STANDARD_INPUT:
        raise ReloadError("The fleet file came from standard input and cannot be read again.")
    try:
        loaded = await asyncio.to_thread(load_fleet, path, os.environ)
    except ConfigError as error:
        problems = "; ".join(str(error).splitlines())
        raise ReloadError(f"The fleet file is refused, and what was read before stays in force: {problems}") from None
    report_warnings(loaded)
    return loaded.spec, loaded.content_hash, loaded.given


def _with_templates(reading: Reading, folder: Path) -> tuple[FleetSpec | None, list[Problem]]:
    """What could be read of the fleet, with template files as text, and the problems with those files."""
    fleet = reading.readable
    if fleet is None:
        return None, []
    problems: list[Problem] = []
    pools: dict[str, PoolSpec] = {}
    for name, pool in fleet.pools.items():
        template, where = pool.chat_template, ("pools", name, "chat_template")
        if template is not None and template.file is not None:
            file = folder / template.file
            try:
                template = structs.replace(template, file=None, text=read_text(file, MAX_TEMPLATE_BYTES))
            except ReadError as error:
                problems.append(reading.problem_at((*where, "file"), f"template {file}: {error}"))
        if template is not None and template.text is not None:
            try:
                compile_template(template.text)
            except ValueError as error:
                problems.append(reading.problem_at(where, str(error)))
        tokenizer = pool.tokenizer
        if tokenizer is not None:
            # Its path is what is published, so it must mean the same wherever a gateway was started.
            path = str((folder / tokenizer.file).absolute())
            tokenizer = structs.replace(tokenizer, file=path)
            at = ("pools", name, "tokenizer")
            try:
                codec = load_tokenizer(path)
            except TokenizerError as error:
                problems.append(reading.problem_at((*at, "file"), f"tokenizer {path} {error}"))
            else:
                try:
                    end_id(codec, pool)
                except TokenizerError as error:
                    problems.append(reading.problem_at(at, str(error)))
        credentials = pool.credentials
        if not isinstance(credentials, str) and credentials.replace.file is not None:
            # Only its path is published, and not looked at here: every gateway reads its own.
            path = str((folder / credentials.replace.file).absolute())
            credentials = ReplaceSpec(replace=SecretSpec(file=path))
        pools[name] = structs.replace(pool, chat_template=template, tokenizer=tokenizer, credentials=credentials)
    gateway = _with_certificates(fleet.gateway, folder)
    return structs.replace(fleet, pools=pools, gateway=gateway), problems


def _with_certificates(gateway: GatewaySpec, folder: Path) -> GatewaySpec:
    """`gateway` with absolute paths of certificates, whichever folder a worker looks from. The gateway reads the files
    when it starts: who checks the fleet file need not have them."""
    found = {}
    for name in ("tls", "admin_tls"):
        if (files := getattr(gateway, name)) is not None:
            paths = {field: str((folder / path).absolute()) for field, path in structs.asdict(files).items() if path}
            found[name] = structs.replace(files, **paths)
    return structs.replace(gateway, **found)


def _expired(reading: Reading, fleet: FleetSpec) -> Iterator[Problem]:
    """A warning for each key that is taken no more."""
    for name, tenant in fleet.tenants.items():
        for index, key in enumerate(tenant.keys):
            if key.expires is not None and has_expired(key.expires, time.time()):
                path = ("tenants", name, "keys", index, "expires")
                yield reading.problem_at(path, f"the key is not taken any more: its last day was {key.expires}")


def _open_admin(reading: Reading, fleet: FleetSpec, settings: Settings) -> list[Problem]:
    """A warning if the admin API is closed, since anybody who reaches this machine could use it."""
    address, tls = fleet.gateway.admin, fleet.gateway.admin_tls
    if settings.admin_token is not None or is_loopback(address) or (tls is not None and tls.client_ca is not None):
        return []
    message = (
        "can be reached from other machines, so nobody may use the admin API without a token: set HEADRACE_ADMIN_TOKEN "
        "for the gateway"
    )
    if "admin" in settings.listen:
        return [Problem(ADDRESSES["admin"], message)]
    return [reading.problem_at(("gateway", "admin"), message)]


def _content_hash(fleet: FleetSpec) -> str:
    """A hash of what gateways publish: not of the addresses, which are each process's own."""
    published = (fleet.fleet, fleet.pools, fleet.routes, fleet.tenants)
    return hashlib.sha256(msgspec.json.encode(published, order="sorted")).hexdigest()
