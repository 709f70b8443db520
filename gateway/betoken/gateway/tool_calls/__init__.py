"""Tool calls in answers: a parser for each format in which models write them, and grammars that enforce them."""
