"""Which release of Betoken this is, and how a part of it that is missing is installed.

The builds of both distributions read the version from here. It knows no package index.
"""

__version__ = "0.2.0"


def how_to_install(extra: str) -> str:
    """A hint how to install the packages of `extra` (or several, with commas between): a command for a checkout."""
    return f"in a checkout of Betoken, pip install -c constraints.txt -e '.[{extra}]'"
