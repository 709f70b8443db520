"""Load tests of a served endpoint that speaks OpenAI's HTTP protocol: `betoken bench` as a library.

Needs the standard library alone, plots need matplotlib. Knows no router, no worker and no gRPC.
"""
