"""TLS with gRPC's own credentials: which files a server and a client use.

A server follows its files, as certificates are renewed while it runs; a client reads them when it makes credentials.
Knows nothing of settings; needs only grpcio and protobuf.
"""

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from betoken.common.errors import BetokenError, FailedPreconditionError, InvalidArgumentError, UnavailableError

_log = logging.getLogger(__name__)

_PEM = b"-----BEGIN "
_CERTIFICATE, _KEY = b"CERTIFICATE-----", b"PRIVATE KEY-----"
_ENCRYPTED = (b"BEGIN ENCRYPTED PRIVATE KEY", b"Proc-Type: 4,ENCRYPTED")
_NO_PAIR = frozenset(("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED"))
"""OpenSSL's reasons for a key that does not match the certificate; the latter two for another key type."""
_UNUSABLE_FILES = "Failed to create security handshaker"  # gRPC's words; which file it was is in its own log only


@dataclass(frozen=True, slots=True)
class ServerTls:
    """Files of a server that speaks TLS."""

    cert_file: Path
    """PEM certificate chain of the server."""
    key_file: Path
    """PEM private key of the certificate, unencrypted."""
    client_ca_file: Path | None = None
    """PEM certificates that sign acceptable clients; None = clients need no certificate."""

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials for `add_secure_port`.

        The files are looked at again with each new connection. A certificate without its key at that moment, one file
        being replaced before the other, changes nothing: gRPC keeps the last pair.

        Raises:
            OSError: a file cannot be read.
            InvalidArgumentError: a file that is not PEM, or another certificate's key.
        """
        last = self._read()
        _check_pair(self.cert_file, self.key_file)

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal last
            try:
                if (now := self._read()) == last:
                    return None
                _check_pair(self.cert_file, self.key_file)
            except (OSError, InvalidArgumentError) as error:
                _log.warning("TLS goes on with the certificate at hand: %s", error)
                return None
            last = now
            _log.info("the TLS files have changed")
            return _configuration(*now)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(*last),
            renewed,  # type: ignore[arg-type]  # None = no news; the stubs forget it
            require_client_authentication=self.client_ca_file is not None,
        )

    def _read(self) -> tuple[bytes, bytes, bytes | None]:
        """Key, certificate, and what signs clients."""
        client_ca = _read_pem("client_ca_file", self.client_ca_file) if self.client_ca_file else None
        return _read_pem("key_file", self.key_file), _read_pem("cert_file", self.cert_file), client_ca


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Files of a client that speaks TLS. All absent: the system's roots, no client certificate."""

    ca_file: str | Path | None = None
    """PEM certificates that sign acceptable servers; None = the roots of the system."""
    cert_file: str | Path | None = None
    """PEM certificate chain of this client, for servers that ask for one."""
    key_file: str | Path | None = None
    """PEM private key of `cert_file`."""
    server_name: str = ""
    """Name expected in the server's certificate if it differs from the address; empty = the address's host."""

    def credentials(self) -> grpc.ChannelCredentials:
        """Credentials for a secure channel.

        Raises:
            OSError: a file cannot be read.
            InvalidArgumentError: a file is not PEM, one of certificate and key is missing or belongs to another, or the
                name is not text.
        """
        try:
            (self.server_name or "").encode()  # None is rejected, too
        except UnicodeEncodeError:  # from undecodable bytes on the command line
            raise InvalidArgumentError("tls.server_name", self.server_name, "must be valid Unicode text") from None
        ca, key, cert = (self._read(name) for name in ("ca_file", "key_file", "cert_file"))
        if bool(key) != bool(cert):  # half a pair ends the whole process, inside gRPC
            name, path = ("tls.cert_file", self.cert_file) if key else ("tls.key_file", self.key_file)
            raise InvalidArgumentError(
                name, str(path or "absent"), "must hold what belongs to the other file of the pair"
            )
        if self.cert_file and self.key_file:
            _check_pair(self.cert_file, self.key_file)
        return grpc.ssl_channel_credentials(ca, key, cert)

    def _read(self, name: str) -> bytes | None:
        file = getattr(self, name)
        return _read_pem(name, file) if file else None

    def channel_options(self) -> list[tuple[str, str]]:
        """Channel options that go with the credentials."""
        return [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []


def with_file_names(error: BetokenError) -> BetokenError:
    """The `error` of a call, or the error of this side's TLS files where gRPC can make nothing of them."""
    if isinstance(error, UnavailableError) and _UNUSABLE_FILES in error.message:
        return FailedPreconditionError("the TLS files of this side hold no certificates, or no certificate and its key")
    return error


def _configuration(key: bytes, cert: bytes, client_ca: bytes | None) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(key, cert)], client_ca)


def _check_pair(cert_file: str | Path, key_file: str | Path) -> None:
    """gRPC only logs that the two do not match. All other faults are left to gRPC.

    Raises:
        InvalidArgumentError: the key is another certificate's.
    """
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(cert_file, key_file, password="")
    except ssl.SSLError as error:
        if error.reason in _NO_PAIR:
            limit = f"must hold the key of the certificate in {cert_file}"
            raise InvalidArgumentError("tls.key_file", str(key_file), limit) from None


def _read_pem(name: str, file: str | Path) -> bytes:
    content = Path(file).read_bytes()
    if name == "key_file" and any(mark in content for mark in _ENCRYPTED):
        raise InvalidArgumentError(f"tls.{name}", str(file), "must be unencrypted, and it asks for a passphrase")
    if name == "key_file" and _CERTIFICATE in content and _KEY not in content:
        raise InvalidArgumentError(f"tls.{name}", str(file), "must hold a private key, and holds a certificate")
    if name != "key_file" and _KEY in content and _CERTIFICATE not in content:
        raise InvalidArgumentError(f"tls.{name}", str(file), "must hold certificates, and holds a private key")
    if _PEM not in content:  # gRPC treats an empty CA file as absent: a client trusts the system's CAs, a server none
        raise InvalidArgumentError(f"tls.{name}", str(file), "must hold PEM, '-----BEGIN ...'")
    return content
