"""The client for a Docker host's API, made the same way for containers and for images.

It connects to that host and nowhere else: its certificates are those of the DockerHost, whatever REQUESTS_CA_BUNDLE says, and it uses
no proxy of the environment, because a container's attached stream could not pass one.
"""

import socket
from typing import Any

import docker
from docker.constants import DEFAULT_DOCKER_API_VERSION
from docker.errors import DockerException
from docker.tls import TLSConfig

from workers.docker.host import AUTHORITY, CERTIFICATE, KEY, DockerHost

Client = Any  # docker.APIClient, which has no types

ANSWER_S = 14  # a Docker host that works tells its version within this time, however busy it is


def docker_client(host: DockerHost, *, timeout_s: int, num_connections: int) -> Client:
    """A client that has agreed on an API version with the Docker host; `timeout_s` limits each call.

    Raises the errors of docker-py and requests if the Docker host does not answer.
    """
    _refuse_if_nobody_listens(host)
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
        version=DEFAULT_DOCKER_API_VERSION,  # replaced below, once the client ignores the environment
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


def _refuse_if_nobody_listens(host: DockerHost) -> None:
    """Try the address ourselves first: docker-py buries the reason in its message, and leaks a Unix socket that it could not connect."""
    try:
        if host.socket_path:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(ANSWER_S)
                probe.connect(host.socket_path)
        else:
            socket.create_connection(host.name_and_port, timeout=ANSWER_S).close()
    except OSError as error:
        raise DockerException(f"nobody listens at {host.url}: {error}") from error
