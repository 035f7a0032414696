"""Certificates made for one test, from an authority that nobody else trusts."""

from __future__ import annotations

import ssl
from pathlib import Path

import trustme

from tests.helpers.http_client import TlsSocket


class Certificates:
    """PEM files in a folder: ``server`` (certificate and key), ``authority``, ``client`` (certificate and key)."""

    def __init__(self, folder: Path, key_type: trustme.KeyType = trustme.KeyType.ECDSA) -> None:
        self._authority = trustme.CA(key_type=key_type)
        self._key_type = key_type
        self.server = folder / "server.pem"
        self.authority = folder / "authority.pem"
        self.client = folder / "client.pem"
        self._authority.cert_pem.write_to_path(self.authority)
        self.renew()
        self._authority.issue_cert("client@test", key_type=key_type).private_key_and_cert_chain_pem.write_to_path(
            self.client
        )

    def renew(self) -> None:
        """Another certificate for the server, in the same file."""
        issued = self._authority.issue_cert("127.0.0.1", "::1", "localhost", key_type=self._key_type)
        issued.private_key_and_cert_chain_pem.write_to_path(self.server)

    def client_context(self, *, with_certificate: bool = False) -> ssl.SSLContext:
        """Of a client that checks the server's name and authority."""
        context = ssl.create_default_context(cafile=self.authority)
        context.sslsocket_class = TlsSocket
        if with_certificate:
            context.load_cert_chain(self.client)
        return context
