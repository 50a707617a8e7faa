"""What a Redis URL may say."""

import re

import pytest

from pipeline import connection
from pipeline.connection import connection_settings, masked


def test_every_part_of_a_url_counts() -> None:
    settings = connection_settings(
        f"rediss://us%40er:p%40ss@host:7/3?ssl_ca_certs={__file__}&ssl_certfile={__file__}&ssl_keyfile={__file__}"
    )
    assert (settings.host, settings.port, settings.database) == ("host", 7, 3)
    assert (settings.username, settings.password) == ("us@er", "p@ss")
    assert (settings.ssl, settings.ssl_check_hostname) == (True, True)
    assert {settings.ssl_ca_certs, settings.ssl_certfile, settings.ssl_keyfile} == {__file__}
    assert connection_settings("rediss://host?ssl_check_hostname=false").ssl_check_hostname is False
    assert connection_settings("redis://host").ssl is False
    assert connection_settings("unix:///path.sock?db=2").database == 2


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://localhost", "must begin with redis://"),
        ("rediss://localhost?ssl_ca=x", "unknown parameter 'ssl_ca'; known are db, ssl_ca_certs"),
        ("redis://localhost?ssl_ca_certs=/dev/null", "ssl_ca_certs is of use with rediss:// only"),
        (
            "rediss://:secret@localhost?ssl_ca_certs=/no/ca.pem",
            "localhost: ssl_ca_certs='/no/ca.pem' is not a file",
        ),
        (f"rediss://localhost?ssl_certfile={__file__}", "ssl_certfile and ssl_keyfile go together"),
        ("rediss://localhost?ssl_check_hostname=maybe", "give true or false"),
        (
            "redis://:secret@localhost/zero",
            "redis://:***@localhost/zero: the database must be a whole number",
        ),
        ("redis://:sec/secret@localhost", "percent-encode the characters / # ? of the password"),
    ],
)
async def test_a_url_that_cannot_work_is_the_users_mistake(url: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as refusal:
        await connection.connect(url, patience_s=0)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:secret@host:6379/0", "redis://:***@host:6379/0"),
        ("rediss://user:se@cret@host:7/1?ssl_ca_certs=/a@b", "rediss://user:***@host:7/1"),
        ("redis://secret@host", "redis://***@host"),
        ("redis://:se/cret@host:1", "redis://***"),
        ("redis://:se#cret@host:1", "redis://***"),
        ("redis://user:12?secret@host", "redis://***"),
        ("redis://host:1/2", "redis://host:1/2"),
        ("unix:///run/redis.sock?db=0", "unix:///run/redis.sock"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert masked(url) == shown
