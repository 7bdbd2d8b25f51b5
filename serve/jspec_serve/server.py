"""Runs the application: sockets, TLS, signals, and an end that lets answers finish."""

import dataclasses
import logging
import socket
import ssl
from types import FrameType

import uvicorn

from jspec_serve.app import create_app
from jspec_serve.service import Service

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listen:
    """Where and how a server listens."""

    host: str = "127.0.0.1"
    port: int = 8000
    tls_certificate: str | None = None
    tls_key: str | None = None
    drain_seconds: int = 60  # that answers get after SIGTERM

    def __post_init__(self) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError(
                "tls_certificate: expected it together with tls_key, got one of them; name both files"
            )
        if self.tls_certificate is not None:
            self._check_certificate(self.tls_certificate)

    def _check_certificate(self, certificate: str) -> None:
        """Raises ValueError for what could not encrypt: else that is told only when the model is loaded."""
        try:
            # A key with a password would be asked for on the terminal.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, self.tls_key, password="")
        except OSError as problem:  # ssl.SSLError is one
            raise ValueError(
                f"tls_certificate: expected PEM files of a certificate and of its key without a password, got "
                f"{certificate} and {self.tls_key} ({problem.strerror or problem}); check both"
            ) from problem

    @property
    def url(self) -> str:
        """Where clients find it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self.tls_key is None else 'https'}://{host}:{self.port}"


class DrainingServer(uvicorn.Server):
    """Takes nothing new on from the first signal on; what runs may finish."""

    def __init__(self, service: Service, *, listen: Listen, api_key: str | None = None):
        """See `Listen` and `create_app`."""
        self._service, self._url = service, listen.url
        super().__init__(
            uvicorn.Config(
                create_app(service, api_key=api_key),
                host=listen.host,
                port=listen.port,
                ssl_certfile=listen.tls_certificate,
                ssl_keyfile=listen.tls_key,
                timeout_graceful_shutdown=listen.drain_seconds,
                access_log=False,  # the gate writes one
                log_config=None,
                server_header=False,
                lifespan="on",
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to listen, and says so."""
        await super().startup(sockets)
        log.info("ready", extra={"fields": {"url": self._url, "model": self._service.name}})

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On SIGTERM and SIGINT."""
        self._service.thread.drain()
        super().handle_exit(sig, frame)


def bound_socket(listen: Listen) -> socket.socket:
    """The listening socket, taken before the model is loaded, so that a port in use is told at once.

    Raises:
      OSError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    sock = socket.socket(family)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((listen.host, listen.port))
    except OSError as problem:
        sock.close()
        raise OSError(
            f"port: expected a free one at {listen.host}, got {listen.port} ({problem.strerror}); choose another"
        ) from problem
    return sock
