"""Receive adapters where no folder is shared.

A run with engine.push_urls sends each adapter here, and the engine loads it from FOLDER. An adapter appears
there only with the hashes of its manifest. Ends at Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
import ssl
import sys
from pathlib import Path
from typing import Annotated

import typer

from skylite.cli.serve import LOOPBACK, SERVER, STOPPED, check_address, chosen_key
from skylite.errors import ConfigError
from skylite.run.own_folders import lock_folder

logger = logging.getLogger(__name__)


def receive(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Folder for adapters, which the engine sees under the same path. Made if missing."
        ),
    ],
    host: Annotated[
        str,
        typer.Option(help="IP address to listen on. 0.0.0.0: all addresses.", rich_help_panel=SERVER),
    ] = LOOPBACK,
    ssl_certfile: Annotated[
        Path | None,
        typer.Option(help="Its certificate (PEM), as of vLLM. Default: plain http.", rich_help_panel=SERVER),
    ] = None,
    ssl_keyfile: Annotated[
        Path | None,
        typer.Option(
            help="The certificate's private key (PEM). Default: plain http.", rich_help_panel=SERVER
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Its port.", rich_help_panel=SERVER)] = 8100,
) -> None:
    """Receive until a signal. Raises SkyliteError subclasses; exits 130 after a stop by a signal."""
    from skylite.engine.receiver import run_receiver  # here, so that --help stays fast

    tls = check_certificate(ssl_certfile, ssl_keyfile)
    check_address(host, port)
    if not tls and not ipaddress.ip_address(host).is_loopback:
        logger.warning(
            f"Any machine that reaches {host} can connect, and plain HTTP shows the key and the adapters to "
            "the network on the way. Give --ssl-certfile and --ssl-keyfile, or use an SSH tunnel."
        )
    folder = Path(os.path.abspath(folder))  # not resolved: a link is refused
    with lock_folder(folder):
        key = chosen_key()
        logger.info(
            f"listens on {host}, port {port}, {'https' if tls else 'http'}; engine.push_urls names it"
        )
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, port), family=family) as listener:
            asyncio.run(run_receiver(folder, key, listener, **tls))
    sys.exit(STOPPED)


def check_certificate(certificate: Path | None, key: Path | None) -> dict[str, str]:
    """uvicorn's options for https, or none for http. Raises ConfigError for files that are no such pair."""
    if certificate is None and key is None:
        return {}
    if certificate is None or key is None:
        raise ConfigError("https takes a certificate and its key.", "Give --ssl-certfile and --ssl-keyfile.")
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except OSError as error:  # SSLError too
        raise ConfigError(
            f"--ssl-certfile {certificate} and --ssl-keyfile {key} are no certificate and its key: {error}.",
            "Name two PEM files.",
        ) from None
    return {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
