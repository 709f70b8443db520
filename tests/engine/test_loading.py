"""Memory held while loading."""

import weakref

from torch import Tensor, nn

from betoken.engine.weights.layers import replace_linears


def test_weights_of_a_replaced_layer_are_freed_during_the_load() -> None:
    """Or all of a model's would be in memory twice for a while."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(4)))
    weights: list[weakref.ref[Tensor]] = []

    def make(weight: Tensor, bias: Tensor | None, is_last: bool) -> nn.Module:
        assert all(earlier() is None for earlier in weights[:-1])
        weights.append(weakref.ref(weight))
        assert not is_last, "this model has none"
        return nn.Identity()

    replace_linears(model, make)
    assert len(weights) == 4
