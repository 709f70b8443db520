"""The definitions of matches and scores in a memory, recomputed over all documents: slow, and literal."""

from betoken.drafters.suffix.settings import MAX_MATCH


def longest_match(documents, tail, depth):
    """(length, continuations), the most recent first; None without a match of two tokens that goes on."""
    tail = list(tail)[-MAX_MATCH:]
    for length in range(len(tail), 1, -1):
        rows = [
            document[place : place + depth]
            for document in reversed(documents)
            for place in reversed(range(length, len(document)))
            if document[place - length : place] == tail[-length:]
        ]
        if rows:
            return length, rows
    return None


def scores_of(rows, length, max_depth):
    """Score of every path that some continuation begins with, at most `max_depth` long."""
    scores = {(): 1.0}
    for depth in range(max_depth):
        for path in [path for path in scores if len(path) == depth]:
            following = [row[depth] for row in rows if tuple(row[:depth]) == path and len(row) > depth]
            for token_id in set(following):
                count = following.count(token_id) + (following[0] == token_id)
                trust = (length + depth) / (length + depth + 1)
                scores[*path, token_id] = scores[path] * count / (len(following) + 1) * trust
    del scores[()]
    return scores
