"""Shows text with each token in the colour of its source.

Knows tokens and a console; knows nothing of streams.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from betoken.client import Piece, SourceInfo, Token

# Six of the sixteen colours, which every palette keeps apart from its background: Solarized makes greys of the bright
# ones: one is its background, and white is the background of its light half.
_COLOURS = {"recovered": "yellow", "bonus": "magenta", "plain": "none", "unknown": "red"}
_SOURCE_COLOURS = ("blue underline", "cyan underline", "green", "cyan", "blue")
"""For sources without a colour, in the order of their first token."""
_MARKS = {"recovered": "underline", "bonus": "italic", "plain": "none", "unknown": "reverse"}
"""For terminals without colours, or users who want none (NO_COLOR)."""
_SOURCE_MARKS = (
    *("bold", "bold underline", "bold italic", "bold italic underline", "italic underline"),
    *("dim", "dim underline", "dim italic", "dim italic underline", "strike", "bold strike"),
    *("italic strike", "underline strike", "dim strike"),
)
_EXPLANATIONS = {
    "recovered": "the target's, at the first rejected position",
    "bonus": "the target's, after a wholly accepted draft",
    "plain": "the target's, without a draft",
    "unknown": "of unknown origin",
}
# Text of a model is not trusted with the terminal: control characters are shown, not obeyed.
_VISIBLE = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_VISIBLE |= {0x7F: 0x2421} | {code: 0xFFFD for code in range(0x80, 0xA0)}


def visible(text: str) -> str:
    """`text` with its control characters shown."""
    return text.translate(_VISIBLE)


class Provenance:
    """Display of token sources on a console: colours, else bold, italics and underlines."""

    def __init__(self, console: Console, sources: Sequence[SourceInfo] = ()) -> None:
        self._console = console
        self._is_plain = console.no_color or console.color_system is None
        self._styles: dict[str, str] = {}
        """Styles of sources by name, in the order of the legend."""
        self._explanations: dict[str, str] = {}
        for source in sources:
            self._add(source.name, "" if self._is_plain else source.colour, source.explains)

    def style(self, provenance: str) -> str:
        """The style of tokens of this provenance."""
        own = (_MARKS if self._is_plain else _COLOURS).get(provenance)
        if own is None and provenance not in self._styles:
            self._add(provenance, "", f"accepted from {visible(provenance)}")
        return own or self._styles[provenance]

    def show(self, piece: Piece) -> None:
        """Write a piece at the cursor, without an additional line break."""
        if not piece.tokens:
            self._write(piece.text, "unknown")
        for token in piece.tokens:
            self._write(token.text, token.provenance)

    def legend(self, tokens: Iterable[Token]) -> Text:
        """One line per provenance that occurs: its name as its tokens are shown, its share of them, what it means."""
        counts = Counter(token.provenance for token in tokens)
        total = counts.total()
        styles = {name: self.style(name) for name in counts}
        order = [*self._styles, *_EXPLANATIONS]
        explanations = self._explanations | _EXPLANATIONS
        lines = [
            Text.assemble(f"{counts[name] / total:4.0%} ", (visible(name), styles[name]), f"  {explanations[name]}")
            for name in order
            if counts[name]
        ]
        return Text("\n").join(lines)

    def _add(self, name: str, colour: str, explains: str) -> None:
        known = _SOURCE_MARKS if self._is_plain else _SOURCE_COLOURS
        taken = set(self._styles.values())
        free = [style for style in known if style not in taken] or known
        self._styles[name] = colour or free[0]
        self._explanations[name] = visible(explains)

    def _write(self, text: str, provenance: str) -> None:
        if text:
            self._console.out(visible(text), style=self.style(provenance), highlight=False, end="")
