"""A draft that is not verified: the target's tokens show how much of it would have been accepted."""

from collections.abc import Sequence

from betoken.drafters.drafter import Drafted


class ShadowDraft:
    """Follows committed ids along a draft, chain or tree, that was made for the same place."""

    def __init__(self, drafted: Drafted) -> None:
        num_nodes = len(drafted.draft_ids)
        parents = range(-1, num_nodes - 1) if drafted.parents is None else drafted.parents
        places = zip(parents, drafted.draft_ids, strict=True)
        self._children = {place: node for node, place in reversed(list(enumerate(places)))}
        self._node = -1
        self._num_tokens = 0

    def follow(self, ids: Sequence[int]) -> int | None:
        """How many tokens its round would have brought, the target's own included; None while that is open.

        `ids`: what was committed next.
        """
        for token_id in ids:
            self._num_tokens += 1
            node = self._children.get((self._node, token_id))
            if node is None:
                return self._num_tokens
            self._node = node
        return None
