"""A router with other constants than its own: a module that tests start in place of `betoken.router`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

OPTION = "--constants"


def constants(**values: Any) -> tuple[str, str]:
    """Options of a router that is started `with taken()`."""
    return OPTION, json.dumps(values)


@contextmanager
def taken() -> Iterator[None]:
    """Routers that are made meanwhile take `constants`, also when they are started again."""
    import pytest

    from betoken.cli import local_services

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_services, "ROUTER_MODULE", __name__)
        yield


def _main() -> None:
    from betoken.router.__main__ import main
    from betoken.router.settings import RouterSettings

    index = sys.argv.index(OPTION)
    for name, value in json.loads(sys.argv[index + 1]).items():
        setattr(RouterSettings, name, value)
    del sys.argv[index : index + 2]
    os._exit(main())  # as the router's own module does


if __name__ == "__main__":
    _main()
