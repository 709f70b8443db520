"""What every process of Betoken needs to speak gRPC: errors, links, server bootstrap, settings, telemetry.

Imports nothing itself: `errors`, `trace` and `tls` must load with grpcio, protobuf and opentelemetry-api alone.
"""
