"""The module's layer equals the literal reference, whatever its flags, and can be trained."""

import itertools

import pytest
import torch
from torch.nn import functional

from tests.drafters.eagle3.reference import LiteralEagle3
from tests.drafters.eagle3.tiny import FLAGS, tiny_layer, tiny_shape

THETA = 10000.0


def literal(layer, embedding):
    shape = layer.shape
    return LiteralEagle3(
        layer.state_dict(),
        embedding,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        eps=shape.rms_norm_eps,
        theta=THETA,
        flags=[flag for flag in FLAGS if getattr(shape, flag)],
    )


def causal(query, key, value):
    """[n, Hq, D], one sequence whose rows are in order."""
    share = query.shape[-2] // key.shape[-2]
    key, value = key.repeat_interleave(share, -2), value.repeat_interleave(share, -2)
    heads = (tensor.transpose(0, 1) for tensor in (query, key, value))
    return functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(0, 1)


@pytest.mark.parametrize("flags", [(), *((flag,) for flag in FLAGS), FLAGS], ids="+".join)
def test_a_forward_over_true_features_equals_the_literal_definition_row_by_row(flags):
    shape = tiny_shape(**dict.fromkeys(flags, True))
    layer = tiny_layer(shape)
    generator = torch.Generator().manual_seed(5)
    embedding = torch.randn(101, 32, generator=generator)
    states = torch.randn(9, 3, 64, generator=generator)
    ids = torch.randint(101, (9,), generator=generator)
    read, fed_back = layer.run(embedding[ids], layer.fuse(states.flatten(1)), torch.arange(9), causal)
    log_probs = layer.lm_head(read).log_softmax(-1)
    reference = literal(layer, embedding)
    for n, token_id in enumerate(ids.tolist()):
        reference.extend(states[n : n + 1], [token_id])
        torch.testing.assert_close(fed_back[n], reference.last[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(log_probs[n], reference.last[1], atol=1e-4, rtol=1e-4)


def test_kept_rows_of_a_forward_equal_those_of_the_whole():
    layer = tiny_layer(tiny_shape())
    embedded, hidden = torch.randn(7, 32), torch.randn(7, 32)
    whole = layer.run(embedded, hidden, torch.arange(7), causal)
    kept = torch.tensor([1, 6])
    for part, all_rows in zip(layer.run(embedded, hidden, torch.arange(7), causal, kept), whole, strict=True):
        torch.testing.assert_close(part, all_rows[kept])


def test_only_differences_of_positions_matter_to_the_eagle3_layer():
    layer = tiny_layer(tiny_shape())
    embedded, hidden = torch.randn(7, 32), torch.randn(7, 32)
    near = layer.run(embedded, hidden, torch.arange(7), causal)[0]
    far = layer.run(embedded, hidden, torch.arange(7) + 100, causal)[0]
    torch.testing.assert_close(near, far, atol=1e-4, rtol=1e-4)


def test_rows_of_many_texts_train_together():
    layer = tiny_layer(tiny_shape(fc_norm=True)).train().requires_grad_(True)
    embedded, states = torch.randn(2, 5, 32), torch.randn(2, 5, 192)
    read, _ = layer.run(
        embedded, layer.fuse(states), torch.arange(5).expand(2, 5), lambda q, k, v: v.repeat(1, 1, 2, 1) + q
    )
    layer.lm_head(read).sum().backward()
    without = [name for name, weight in layer.named_parameters() if weight.grad is None and "k_proj" not in name]
    assert without == []


def test_first_generation_eagle_reads_embedding_and_feature_together():
    shape = tiny_shape(version=1, hidden_size=64, has_fc_bias=True, draft_vocab_size=101)
    layer = tiny_layer(shape, spread=0.1)
    embedded, states = torch.randn(6, 64), torch.randn(6, 64)
    read, fed_back = layer.run(embedded, layer.fuse(states), torch.arange(6), causal)
    assert read is fed_back
    x = layer.fc(torch.cat((embedded, states), -1))
    attention = layer.layers[0].self_attn
    first = attention.o_proj(attention.v_proj(x[:1]).view(1, 2, 8).repeat_interleave(2, 1).flatten(1))  # sees itself
    y = x[:1] + first
    normed = layer.layers[0].post_attention_layernorm(y)
    mlp = layer.layers[0].mlp
    y = y + mlp.down_proj(functional.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed))
    torch.testing.assert_close(read[:1], y, atol=1e-4, rtol=1e-4)


def test_flags_of_the_layer_change_its_output():
    """Else the comparison above would compare nothing."""
    embedded, states = torch.randn(7, 32), torch.randn(7, 192)
    outcomes = []
    for flags in [(), *((flag,) for flag in FLAGS)]:
        layer = tiny_layer(tiny_shape(**dict.fromkeys(flags, True)))
        outcomes.append(layer.run(embedded, layer.fuse(states), torch.arange(7), causal)[1])
    for one, other in itertools.combinations(outcomes, 2):
        assert (one - other).abs().max() > 1e-2
