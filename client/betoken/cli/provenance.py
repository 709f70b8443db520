"""Shows text with each token in the colour of where it came from.

Knows tokens and a console; knows nothing of streams.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.text import Text

from betoken.client import Piece, Token

# Of the sixteen colours the six that every palette keeps apart from its background: Solarized makes greys of the bright
# ones, of which one is its background, and white is that of its light half.
_COLOURS = {
    "model": "green",
    "ngram": "cyan",
    "lookahead": "blue",
    "early_exit": "green underline",
    "custom": "blue underline",
    "recovered": "yellow",
    "bonus": "magenta",
    "plain": "none",
    "unknown": "red",
}
_MARKS = {
    "model": "bold",
    "ngram": "bold underline",
    "lookahead": "bold italic",
    "early_exit": "bold italic underline",
    "custom": "italic underline",
    "recovered": "underline",
    "bonus": "italic",
    "plain": "none",
    "unknown": "reverse",
}
"""For terminals without colours, or users who want none (NO_COLOR)."""
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


def styles(console: Console) -> Mapping[str, str]:
    """How this console can tell provenances apart: by colours, else by weight, slant and lines."""
    return _MARKS if console.no_color or console.color_system is None else _COLOURS


def visible(text: str) -> str:
    """`text` with its control characters shown."""
    return text.translate(_VISIBLE)


def show(console: Console, piece: Piece) -> None:
    """Writes a piece at the cursor, without a line break of its own."""
    if not piece.tokens:
        _write(console, piece.text, "unknown")
    for token in piece.tokens:
        _write(console, token.text, token.provenance)


def legend(console: Console, tokens: Iterable[Token]) -> Text:
    """One line per provenance that occurs: its name as its tokens are shown, its share of them, what it means."""
    counts = Counter(token.provenance for token in tokens)
    total, known = counts.total(), styles(console)
    lines = []
    for name, style in known.items():
        if counts[name]:
            share = f"{counts[name] / total:4.0%} "
            lines.append(Text.assemble(share, (name, style), f"  {_EXPLANATIONS[name]}"))
    return Text("\n").join(lines)


def _write(console: Console, text: str, provenance: str) -> None:
    if text:
        console.out(visible(text), style=styles(console).get(provenance), highlight=False, end="")
