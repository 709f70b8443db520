"""The router: admits requests, runs draft-verify-commit rounds against workers, streams the target's own tokens.

Knows token ids, text and links; knows no tensors and never imports torch.
"""
