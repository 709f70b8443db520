"""Ends a build under too old a Python in one sentence: pip would first complain of dependencies that need a newer one.

The builds of both distributions load it. Their content is unknown to it.
"""

import sys

from hatchling.metadata.plugin.interface import MetadataHookInterface

OLDEST = (3, 11)


class CustomMetadataHook(MetadataHookInterface):  # type: ignore[misc]
    """Looks at the Python of the build and leaves the metadata as it is."""

    def update(self, metadata: dict[str, object]) -> None:
        """Raises:
        SystemExit: this Python is too old.
        """
        now = sys.version_info[:2]
        if now < OLDEST:
            sys.exit("Betoken needs Python {}.{} or newer, this is {}.{}".format(*OLDEST, *now))
