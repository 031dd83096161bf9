"""`headrace schema`: the JSON Schema of a fleet file, for editors and for checks outside headrace."""

import msgspec
import typer

from router.spec.schema import fleet_schema


def schema() -> None:
    """Print the JSON Schema of a fleet file.

    \b
    Example:
      headrace schema > fleet.schema.json
    """
    typer.echo(schema_text(), nl=False)


def schema_text() -> str:
    """The schema as `docs/fleet.schema.json` holds it."""
    return msgspec.json.format(msgspec.json.encode(fleet_schema()), indent=2).decode() + "\n"
