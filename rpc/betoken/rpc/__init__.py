"""The gRPC base of every process of Betoken: errors, links, server bootstrap, settings, telemetry.

Imports nothing itself: `errors`, `trace` and `tls` must load with grpcio, protobuf and opentelemetry-api alone.
"""
