"""EAGLE-3 as the paper and its checkpoints define it, one row at a time, over plain tensors by name.

Every row of attention is a softmax over the keys of its own path; nothing is batched, cached or shared. A path's keys
are those of the text, made of the target's states, and those of its own drafted rows, made of what the layer fed back.
The tree is EAGLE-2's: the `top_k` likeliest children of each of the `top_k` likeliest nodes of the level before, and in
the end the likeliest of all that were scored.
"""

import math

import torch


def rms_norm(x, weight, eps):
    return weight * (x.float() * torch.rsqrt((x.float() ** 2).mean() + eps)).to(x.dtype)


def rotate(x, position, theta):
    """One head's vector [D], turned pair by pair (i, i + D / 2)."""
    half = x.shape[0] // 2
    out = torch.empty_like(x)
    for i in range(half):
        angle = position * theta ** (-i / half)
        cos, sin = math.cos(angle), math.sin(angle)
        out[i] = x[i] * cos - x[half + i] * sin
        out[half + i] = x[half + i] * cos + x[i] * sin
    return out


class LiteralEagle3:
    """One sequence. `weights` in SafeAILab's names; `embedding` [V, H] is the target's."""

    def __init__(self, weights, embedding, *, num_heads, num_kv_heads, head_dim, eps, theta, flags=()):
        self.w, self.embedding, self.flags = weights, embedding, set(flags)
        self.sizes, self.eps, self.theta = (num_heads, num_kv_heads, head_dim), eps, theta
        self.rows = []
        """(key, value) of every position of the text whose state is known."""
        self.last = None

    def fuse(self, states):
        """[3, Ht] -> [H]."""
        if "fc_norm" in self.flags:
            states = torch.stack(
                [rms_norm(state, self.w[f"fc_norm.{i}.weight"], self.eps) for i, state in enumerate(states)]
            )
        joined = states.flatten()
        if "norm_before_fc" in self.flags:
            joined = rms_norm(joined, self.w["input_norm.weight"], self.eps)
        return self.w["fc.weight"] @ joined

    def row(self, hidden, token_id, position, before):
        """(fed back, log-probabilities [Vd], (key, value)) of one row that sees `before`, keys and values."""
        w, (num_heads, num_kv_heads, head_dim) = self.w, self.sizes
        normed = rms_norm(hidden, w["midlayer.hidden_norm.weight"], self.eps)
        residual = normed if "norm_before_residual" in self.flags else hidden
        embedded = rms_norm(self.embedding[token_id], w["midlayer.input_layernorm.weight"], self.eps)
        x = torch.cat([embedded, normed])
        query, key, value = (w[f"midlayer.self_attn.{name}_proj.weight"] @ x for name in "qkv")
        query = [rotate(part, position, self.theta) for part in query.view(num_heads, head_dim)]
        key = torch.stack([rotate(part, position, self.theta) for part in key.view(num_kv_heads, head_dim)])
        value = value.view(num_kv_heads, head_dim)
        seen = [*before, (key, value)]
        heads = []
        for head in range(num_heads):
            shared = head // (num_heads // num_kv_heads)
            scores = torch.stack([query[head] @ k[shared] for k, _ in seen]) / math.sqrt(head_dim)
            shares = scores.softmax(0)
            heads.append(sum(share * v[shared] for share, (_, v) in zip(shares, seen, strict=True)))
        x = residual + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(heads)
        normed = rms_norm(x, w["midlayer.post_attention_layernorm.weight"], self.eps)
        gate, up = w["midlayer.mlp.gate_proj.weight"] @ normed, w["midlayer.mlp.up_proj.weight"] @ normed
        out = x + w["midlayer.mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)
        final = rms_norm(out, w["norm.weight"], self.eps)
        log_probs = (w["lm_head.weight"] @ final).log_softmax(0)
        return (final if "norm_output" in self.flags else out), log_probs, (key, value)

    def extend(self, states, token_ids):
        """Take in true states [n, 3, Ht], each with the token after its position."""
        for state, token_id in zip(states, token_ids, strict=True):
            self.last = self.row(self.fuse(state), token_id, len(self.rows), self.rows)
            self.rows.append(self.last[2])

    def target_id(self, draft_id):
        return draft_id + int(self.w["d2t"][draft_id])

    def tree(self, num_nodes, top_k, depth):
        """(token ids, parents, log-probabilities of the paths) of the `num_nodes` likeliest, parents first.

        `depth`: ids on the longest path. The first of equals is the older one.
        """
        nodes = []  # (path ids, score, parent, fed back of the parent's row, rows of the drafted path before it)
        level = [(self.last[0], self.last[1], [], 0.0, -1, [])]
        for _ in range(depth):
            found = []
            for fed_back, log_probs, path, score, parent, rows in level:
                best = log_probs.topk(min(top_k, len(log_probs)))
                for log_prob, draft_id in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                    token_id = self.target_id(draft_id)
                    nodes.append(([*path, token_id], score + log_prob, parent, fed_back, rows))
                    found.append(len(nodes) - 1)
            level = []
            for index in sorted(found, key=lambda index: -nodes[index][1])[:top_k]:
                path, score, _, fed_back, rows = nodes[index]
                position = len(self.rows) + len(path) - 1
                fed, log_probs, own = self.row(fed_back, path[-1], position, [*self.rows, *rows])
                level.append((fed, log_probs, path, score, index, [*rows, own]))
        kept = sorted(sorted(range(len(nodes)), key=lambda index: -nodes[index][1])[:num_nodes])
        places = {index: place for place, index in enumerate(kept)} | {-1: -1}
        return (
            [nodes[index][0][-1] for index in kept],
            [places[nodes[index][2]] for index in kept],
            [nodes[index][1] for index in kept],
        )
