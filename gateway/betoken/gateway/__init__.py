"""The HTTP gateway: OpenAI's protocol in front of a router, and a page that visualises speculation.

A separate process over the async SDK. Knows no model, no tokenizer and no worker; needs the extra `gateway`.
"""
