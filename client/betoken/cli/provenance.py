"""Shows text with each token in the colour of where it came from.

Knows tokens and a console; knows nothing of streams.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from betoken.client import Piece, Token

STYLES = {
    "model": "green",
    "ngram": "cyan",
    "lookahead": "blue",
    "early_exit": "bright_green",
    "custom": "bright_blue",
    "recovered": "yellow",
    "bonus": "magenta",
    "plain": "bright_black",
    "unknown": "white",
}
_EXPLANATIONS = {
    "model": "accepted from the draft model",
    "ngram": "accepted from prompt lookup",
    "lookahead": "accepted from lookahead",
    "early_exit": "accepted from the target's first layers",
    "custom": "accepted from a plug-in",
    "recovered": "the target's, where it refused the draft",
    "bonus": "the target's, after a wholly accepted draft",
    "plain": "the target's, without a draft",
    "unknown": "of unknown origin",
}
# Text of a model is not trusted with the terminal: control characters are shown, not obeyed.
_VISIBLE = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_VISIBLE |= {0x7F: 0x2421} | {code: 0xFFFD for code in range(0x80, 0xA0)}


def show(console: Console, piece: Piece) -> None:
    """Writes a piece at the cursor, without a line break of its own."""
    if not piece.tokens:
        _write(console, piece.text, "unknown")
    for token in piece.tokens:
        _write(console, token.text, token.provenance)


def legend(tokens: Iterable[Token]) -> Text:
    """One line per provenance that occurs: its colour, its share of the tokens, what it means."""
    counts = Counter(token.provenance for token in tokens)
    total = counts.total()
    lines = []
    for name in STYLES:
        if counts[name]:
            share = f"{counts[name] / total:4.0%}"
            lines.append(Text.assemble(("■ ", STYLES[name]), f"{share} {name}", (f"  {_EXPLANATIONS[name]}", "dim")))
    return Text("\n").join(lines)


def _write(console: Console, text: str, provenance: str) -> None:
    if text:
        console.out(text.translate(_VISIBLE), style=STYLES.get(provenance), highlight=False, end="")
