"""The engine's API client, made the same way for containers and for images.

It goes to the engine and nowhere else: certificates are those of the DockerHost, whatever REQUESTS_CA_BUNDLE says, and no proxy of
the environment is asked, which a container's attached stream could not pass.
"""

import socket
from typing import Any

import docker
from docker.constants import DEFAULT_DOCKER_API_VERSION
from docker.errors import DockerException
from docker.tls import TLSConfig

from workers.docker.host import AUTHORITY, CERTIFICATE, KEY, DockerHost

Client = Any  # docker.APIClient, which has no types

ANSWER_S = 14  # an engine that is not out says its version within this, however busy it is


def docker_client(host: DockerHost, *, timeout_s: int, num_connections: int) -> Client:
    """A client that has agreed on a version with the engine; `timeout_s` is each call's.

    Raises what docker-py and requests raise if the engine does not answer.
    """
    _knock(host)
    folder = host.certificates
    client: Client = docker.APIClient(
        base_url=host.url,
        tls=TLSConfig(
            client_cert=(str(folder / CERTIFICATE), str(folder / KEY)),
            ca_cert=str(folder / AUTHORITY),
            verify=host.verify,
        )
        if folder is not None
        else False,
        version=DEFAULT_DOCKER_API_VERSION,  # asked for below, once the environment is out of it
        timeout=ANSWER_S,
        max_pool_size=num_connections,
    )
    client.trust_env = False
    try:
        client._version = client._retrieve_server_version()
    except BaseException:
        client.close()
        raise
    client.timeout = timeout_s
    return client


def _knock(host: DockerHost) -> None:
    """Nobody at a Unix socket is found out here: docker-py forgets to close the socket that it could not connect."""
    if host.socket_path:
        with socket.socket(socket.AF_UNIX) as caller:
            caller.settimeout(ANSWER_S)
            try:
                caller.connect(host.socket_path)
            except OSError as error:
                raise DockerException(f"nobody answers at {host.url}: {error}") from error
