"""The server's certificate, checked by the launcher before anything starts, used by the API processes."""

from __future__ import annotations

import ssl
from pathlib import Path

from tokservice.runtime.config import ApiConfig
from tokservice.wire.errors import ConfigError


def server_context(settings: ApiConfig) -> ssl.SSLContext:
    """What ``ssl_certfile`` and its companions describe: TLS 1.2 and newer. Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    certificates = settings.ssl_certfile
    _check_certificates(certificates, "api.ssl_certfile")
    key = settings.ssl_keyfile or certificates
    _check_readable(key, "api.ssl_keyfile")

    def refuse_password() -> str:  # or OpenSSL would ask the terminal for one
        raise ConfigError(f"api.ssl_keyfile: the key in {key} is encrypted; give one that needs no password")

    try:
        context.load_cert_chain(certificates, key, password=refuse_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"api.ssl_keyfile: {key} is not the key of the certificate in {certificates}") from None
        what = "api.ssl_keyfile" if settings.ssl_keyfile else "api.ssl_certfile"
        raise ConfigError(f"{what}: {key} holds no private key that can be used ({error.reason or error})") from None
    if settings.ssl_ca_certs:
        _check_certificates(settings.ssl_ca_certs, "api.ssl_ca_certs")
        context.load_verify_locations(settings.ssl_ca_certs)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _check_certificates(file: str, name: str) -> None:
    _check_readable(file, name)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(file)
    except ssl.SSLError as error:
        raise ConfigError(f"{name}: {file} holds no PEM certificate ({error.reason or error})") from None


def _check_readable(file: str, name: str) -> None:
    try:
        with Path(file).open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{name}: cannot read {file}: {error.strerror}") from None
