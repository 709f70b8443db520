"""The operations of verification: noise, logits adjustment, sampling, acceptance, paged attention.

Each op is a folder with a torch reference and faster implementations with the same signature; `dispatch` says
which one runs. Sequences, the owners of pages and requests are unknown here.
"""
