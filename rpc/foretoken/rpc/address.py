"""What may be dialled, told before gRPC guesses."""


def is_host_port(address: str) -> bool:
    """Whether `address` is HOST:PORT, [HOST]:PORT for IPv6.

    gRPC takes much else: it dials a host without a port at 443, port 65537 at 1, and looks a URL up as a name.
    """
    host, _, port = address.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    is_host = bool(host) and "/" not in host and (is_bracketed or ":" not in host)
    return is_host and port.isascii() and port.isdecimal() and 0 < int(port) < 65536
