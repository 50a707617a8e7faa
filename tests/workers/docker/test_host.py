"""Which Docker hosts a worker uses: an address that is wrong is refused, with the fix."""

from pathlib import Path

import pytest

from workers.docker.host import LOCAL, DockerHost
from workers.settings import docker_host, docker_hosts

VARIABLES = (
    "SWERVE_DOCKER_HOSTS", "SWERVE_DOCKER_CERTS", "DOCKER_HOST", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH"
)  # fmt: skip


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def folder(path: Path, *files: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for file in files or ("ca.pem", "cert.pem", "key.pem"):
        (path / file).touch()
    return path


def test_the_default_is_that_of_docker() -> None:
    assert docker_hosts() == (DockerHost(LOCAL),)


def test_the_one_of_docker_host_unless_a_list_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///run/other.sock")
    assert docker_hosts() == (docker_host(),) == (DockerHost("unix:///run/other.sock"),)
    monkeypatch.setenv("SWERVE_DOCKER_HOSTS", "unix:///a.sock=3  tcp://[::1]:2375 tcp://b:2375=12")
    assert docker_hosts() == (
        DockerHost("unix:///a.sock", slots=3),
        DockerHost("tcp://[::1]:2375"),
        DockerHost("tcp://b:2375", slots=12),
    )
    assert docker_hosts()[1].name_and_port == ("::1", 2375)


@pytest.mark.parametrize(
    ("entry", "fix"),
    [
        ("tcp://a", "give unix:///PATH or tcp://HOST:PORT"),
        ("tcp://a:b", "give unix:///PATH or tcp://HOST:PORT"),
        ("tcp://u@a:2375", "give unix:///PATH or tcp://HOST:PORT"),
        ("tcp://a:2375/v1.41", "give unix:///PATH or tcp://HOST:PORT"),
        ("unix://run/docker.sock", "give unix:///PATH or tcp://HOST:PORT"),
        ("ssh://a", "give unix:///PATH or tcp://HOST:PORT"),
        ("tcp://a:2376=0", "a whole number from 1"),
        ("tcp://a:2376=many", "a whole number from 1"),
        ("unix:///a unix:///b unix:///a", "unix:///a is given twice: name each Docker host once"),
    ],
)
def test_what_makes_no_sense_is_named_with_the_fix(
    monkeypatch: pytest.MonkeyPatch, entry: str, fix: str
) -> None:
    monkeypatch.setenv("SWERVE_DOCKER_HOSTS", entry)
    with pytest.raises(ValueError, match=r"^SWERVE_DOCKER_HOSTS: ") as refused:
        docker_hosts()
    assert fix in str(refused.value)


def test_docker_host_is_one_address_without_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://a:2375=4")
    with pytest.raises(ValueError, match=r"^DOCKER_HOST="):
        docker_host()


def test_tls_is_asked_for_as_dockers_own_clients_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://a:2376")
    assert docker_host().tls() is None
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    with pytest.raises(ValueError, match=r"DOCKER_CERT_PATH: .*/\.docker lacks ca.pem, cert.pem, key.pem"):
        docker_host()
    folder(tmp_path / ".docker")
    assert docker_host() == DockerHost("tcp://a:2376", tmp_path / ".docker", verify=True)
    other = folder(tmp_path / "other", "cert.pem", "key.pem")
    monkeypatch.setenv("DOCKER_CERT_PATH", str(other))
    with pytest.raises(ValueError, match=r"DOCKER_CERT_PATH: .*/other lacks ca.pem, "):
        docker_host()
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "")
    assert docker_host() == DockerHost("tcp://a:2376", other, verify=False)
    monkeypatch.setenv("DOCKER_HOST", LOCAL)
    assert docker_host() == DockerHost(LOCAL)


def test_a_docker_host_may_have_certificates_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = folder(tmp_path / "certs/a")
    monkeypatch.setenv("SWERVE_DOCKER_CERTS", str(own.parent))
    monkeypatch.setenv("SWERVE_DOCKER_HOSTS", "tcp://a:2376=2 tcp://b:2376")
    with pytest.raises(ValueError, match=r"SWERVE_DOCKER_CERTS=.* has no folder b, for tcp://b:2376"):
        docker_hosts()
    monkeypatch.setenv("DOCKER_CERT_PATH", str(folder(tmp_path / "shared")))
    assert docker_hosts() == (
        DockerHost("tcp://a:2376", own, verify=True, slots=2),
        DockerHost("tcp://b:2376", tmp_path / "shared", verify=False),
    )
