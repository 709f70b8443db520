"""`betoken new-key`: a fresh API key, and the entry of a router's `--api-keys-file` that lets it in.

Knows no router: the entry is to be added to the file by hand.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from betoken.common.api_key import hash_of, new_api_key


def new_key(
    name: Annotated[str, typer.Argument(help="Name of the key in errors and logs.")],
    tenant: Annotated[str, typer.Option(help="Tenant of its requests; absent = the key's name.")] = "",
    json_: Annotated[
        bool, typer.Option("--json", help="Print key, hash and entry as one JSON object to standard output.")
    ] = False,
) -> None:
    """Make an API key: the entry for the router's file goes to standard output, the key to standard error, once."""
    for option, value in (("NAME", name or " "), ("--tenant", tenant)):
        if not all("!" <= character <= "~" for character in value):
            raise typer.BadParameter("must be visible ASCII characters", param_hint=option)
    key = new_api_key()
    lines = ["[[keys]]", f"name = {json.dumps(name)}", f"hash = {json.dumps(hash_of(key))}"]
    if tenant:
        lines.append(f"tenant = {json.dumps(tenant)}")
    entry = "\n".join(lines)
    if json_:
        print(json.dumps({"name": name, "tenant": tenant or name, "key": key, "hash": hash_of(key), "entry": entry}))
        return
    print(entry)
    sys.stderr.write(f"the key, shown only now: {key}\n")
