"""The HTTP door: OpenAI's protocol in front of a router, and a page that shows what speculation does.

A process of its own over the async SDK. Knows no model, no tokenizer and no worker; needs the extra `gateway`.
"""
