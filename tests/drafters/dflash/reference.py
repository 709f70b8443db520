"""DFlash, DFlash 2 and DSpark as their papers and files define them, one block at a time, over plain tensors by name.

Nothing is batched, cached or shared: each block computes the keys and values of the whole context again.
"""

import torch


def rms_norm(x, weight, eps):
    return weight * x * torch.rsqrt((x**2).mean(-1, keepdim=True) + eps)


def rotate(x, positions, theta):
    """x [n, heads, D], turned pair by pair (i, i + D / 2)."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * theta ** (-torch.arange(half) / half)
    low, high = x[..., :half], x[..., half:]
    turned = (low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin())
    return torch.cat(turned, dim=-1)


class LiteralBlock:
    """`weights` in z-lab's names; embeddings [V, H] and head [V, H] are the target's unless the weights have them."""

    def __init__(self, weights, embedding, head, shape, theta=10000.0):
        self.w, self.shape, self.theta = weights, shape, theta
        self.embedding = weights.get("embed_tokens.weight", embedding)
        self.head = weights.get("lm_head.weight", head)

    def hidden(self, states, last_id):
        """True states [n, S, Ht] of the text before its last token -> [B, H] of the block."""
        w, shape, eps = self.w, self.shape, self.shape.rms_norm_eps
        context = rms_norm(states.flatten(1) @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
        x = self.embedding[torch.tensor([last_id] + [shape.mask_token_id] * (shape.block_size - 1))]
        for layer in range(shape.num_layers):
            name = f"layers.{layer}."
            normed = rms_norm(x, w[name + "input_layernorm.weight"], eps)
            x = x + self.around(name + "attention_conv.", normed, lambda y: self.attend(name, context, y))  # noqa: B023
            normed = rms_norm(x, w[name + "post_attention_layernorm.weight"], eps)
            x = x + self.around(name + "mlp_conv.", normed, lambda y: self.mlp(name, y))  # noqa: B023
        return rms_norm(x, w["norm.weight"], eps)

    def attend(self, name, context, x):
        w, shape, size, eps = self.w, self.shape, self.shape.head_dim, self.shape.rms_norm_eps
        read = torch.cat([context, x])
        q, k, v = (
            (rows @ w[f"{name}self_attn.{kind}_proj.weight"].T).unflatten(-1, (-1, size))
            for kind, rows in (("q", x), ("k", read), ("v", read))
        )
        positions = torch.arange(len(read))
        q = rotate(rms_norm(q, w[name + "self_attn.q_norm.weight"], eps), positions[len(context) :], self.theta)
        k = rotate(rms_norm(k, w[name + "self_attn.k_norm.weight"], eps), positions, self.theta)
        k, v = (rows.repeat_interleave(shape.num_heads // shape.num_kv_heads, 1) for rows in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / size**0.5
        distance = positions[len(context) :, None] - positions[None]
        if shape.is_causal:
            scores = scores.masked_fill(distance < 0, -torch.inf)
        if shape.window:
            scores = scores.masked_fill(distance.abs() >= shape.window, -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        return mixed @ w[name + "self_attn.o_proj.weight"].T

    def mlp(self, name, x):
        gate, up = (x @ self.w[f"{name}mlp.{kind}_proj.weight"].T for kind in ("gate", "up"))
        return (gate * torch.sigmoid(gate) * up) @ self.w[name + "mlp.down_proj.weight"].T

    def around(self, name, x, sublayer):
        """DFlash 2's convolutions before and after a part of a layer."""
        if not self.shape.conv_kernel_size:
            return sublayer(x)
        base = self.w[name + "base_kernel"]  # [2, K, H]
        dynamic = (x @ self.w[name + "kernel_projection.weight"].T).view(len(x), 2, self.shape.conv_kernel_size, -1)

        def convolve(side, y):
            out = torch.zeros_like(y)
            for i in range(len(y)):
                for tap in range(min(i + 1, self.shape.conv_kernel_size)):
                    delta = dynamic[i, side, tap].repeat_interleave(self.shape.conv_group_size)
                    out[i] += (base[side, tap] + delta) * y[i - tap]
            return out

        return convolve(1, sublayer(convolve(0, x)))

    def draft(self, states, last_id):
        """(greedy ids, confidences) of the block; no confidences without a head for them."""
        w, shape = self.w, self.shape
        hidden = self.hidden(states, last_id)[0 if shape.predicts_first else 1 :]
        logits = hidden @ self.head.T * shape.output_multiplier
        if shape.softcap:
            logits = torch.tanh(logits / shape.softcap) * shape.softcap
        ids, confidences, previous = [], [], last_id
        state = torch.zeros(shape.markov_rank)
        for scores, h in zip(logits, hidden, strict=True):
            if shape.has_confidence:
                read = h
                if shape.confidence_reads_markov:
                    read = torch.cat([h, w["markov_head.markov_w1.weight"][previous]])
                logit = w["confidence_head.proj.weight"][0] @ read + w["confidence_head.proj.bias"][0]
                confidences.append(float(torch.sigmoid(logit)))
            if shape.markov_rank:
                bias, state = self.markov(previous, h, state)
                scores = scores + bias
            if shape.selector_rank:
                scores = self.selected(scores, h, previous)
            previous = int(scores.argmax())
            ids.append(previous)
        return ids, confidences

    def markov(self, previous, h, state):
        w, latent = self.w, self.w["markov_head.markov_w1.weight"][previous]
        if self.shape.markov_head_type == "gated":
            joined = torch.cat([h, latent])
            gate = w["markov_head.gate_proj.weight"] @ joined + w["markov_head.gate_proj.bias"]
            latent = torch.sigmoid(gate) * latent
        if self.shape.markov_head_type == "rnn":
            joined = torch.cat([state, latent, h])
            gate, new, out = (w["markov_head.joint_proj.weight"] @ joined + w["markov_head.joint_proj.bias"]).chunk(3)
            gate = torch.sigmoid(gate)
            state, latent = gate * state + (1 - gate) * torch.tanh(new), torch.tanh(out)
        return w["markov_head.markov_w2.weight"] @ latent, state

    def selected(self, scores, h, previous):
        w = self.w
        candidates = scores.topk(self.shape.selector_top_k).indices
        query = w["candidate_selector.predecessor_codebook"][previous]
        query = query * (w["candidate_selector.hidden_projection.weight"] @ h)
        corrected = torch.full_like(scores, -torch.inf)
        for candidate in candidates.tolist():
            fit = query @ w["candidate_selector.successor_codebook"][candidate]
            corrected[candidate] = scores[candidate] + fit
        return corrected
