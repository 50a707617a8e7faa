"""Who is let in, what every reply says to the browser, and that nothing outside the runs is read."""

from pathlib import Path

import pytest
from yarl import URL

from infra.web import security
from infra.web.__main__ import main
from infra.web.app import STATIC
from tests.infra.web.example_run import Client, Serve, read
from tests.pipeline import samples

TOKEN = "0123456789abcdef"


def as_written(client: Client, path: str) -> URL:
    """The address of a path that nobody tidied on its way."""
    return URL(str(client.make_url("/")).removesuffix("/") + path, encoded=True)


@pytest.mark.parametrize("path", ["/", "/static/app.js", "/api/runs", "/nosuch", "/api/runs/nosuch/series"])
async def test_every_reply_forbids_scripts_of_others(serve: Serve, run_dir: Path, path: str) -> None:
    client = await serve(run_dir)
    async with client.get(path) as response:
        policy = response.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        if path.startswith("/api") or path == "/nosuch":
            assert response.content_type == "application/json"


def test_pages_hold_no_script_or_style_that_the_policy_would_stop() -> None:
    page = (STATIC / "index.html").read_text()
    assert "<style" not in page
    assert " style=" not in page
    assert " onclick=" not in page
    assert all("src=" in tag.partition(">")[0] for tag in page.split("<script")[1:])


@pytest.mark.parametrize("name", ["%2e%2e", "..%2f..%2f..%2fetc", "%2fetc%2fpasswd", "mine", "mine%00"])
async def test_a_run_is_named_by_its_id_and_never_by_a_path(serve: Serve, run_dir: Path, name: str) -> None:
    client = await serve(run_dir)
    for path in (f"/api/runs/{name}/series", f"/api/runs/{samples.RUN}/rollouts/{name}"):
        async with client.session.get(as_written(client, path)) as response:
            assert response.status == 404, path


@pytest.mark.parametrize(
    "path", ["..%2fapp.py", "%2e%2e/app.py", "..%2f..%2f..%2fREADME.md", "%2fetc%2fpasswd"]
)
async def test_no_file_outside_the_pages_is_served(serve: Serve, run_dir: Path, path: str) -> None:
    client = await serve(run_dir)
    async with client.session.get(as_written(client, f"/static/{path}")) as response:
        assert response.status in (403, 404)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_nothing_can_be_changed(serve: Serve, run_dir: Path, method: str) -> None:
    client = await serve(run_dir)
    async with client.request(method, "/api/runs") as response:
        assert response.status == 405


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(("localhost:8090", 200), ("127.0.0.1", 200), ("[::1]:8090", 200)),
        *(("evil.example", 403), ("127.0.0.1.evil.example:8090", 403), ("[::2]", 403), ("[::1].evil", 403)),
    ],
)
async def test_on_loopback_the_host_header_names_this_machine(
    serve: Serve, run_dir: Path, host: str, status: int
) -> None:
    client = await serve(run_dir)
    async with client.get("/api/runs", headers={"Host": host}) as response:
        assert response.status == status


async def test_with_a_token_nobody_is_let_in_without_it(serve: Serve, run_dir: Path) -> None:
    client = await serve(run_dir, token=TOKEN)
    for path in ("/", "/api/runs", "/static/app.js", "/events", f"/api/runs?token={TOKEN[:-1]}"):
        async with client.get(path) as response:
            assert response.status == 401, path


async def test_a_token_in_the_address_becomes_a_cookie_and_leaves_the_address(
    serve: Serve, run_dir: Path
) -> None:
    client = await serve(run_dir, token=TOKEN)
    async with client.get(f"/?token={TOKEN}&x=1", allow_redirects=False) as response:
        assert (response.status, response.headers["Location"]) == (303, "/?x=1")
        cookie = response.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
    _keep_cookie(client)
    assert (await read(client, "/api/runs"))["runs"][0]["id"] == samples.RUN


def _keep_cookie(client: Client) -> None:
    """As a browser does; the client keeps none for an address that is a number."""
    client.session.cookie_jar.update_cookies({security.COOKIE: TOKEN}, client.make_url("/"))
    client.session.headers["Cookie"] = f"{security.COOKIE}={TOKEN}"


async def test_the_way_back_from_the_token_leads_nowhere_else(serve: Serve, run_dir: Path) -> None:
    client = await serve(run_dir, token=TOKEN)
    address = as_written(client, f"//evil.example/?token={TOKEN}")
    async with client.session.get(address, allow_redirects=False) as response:
        assert response.headers["Location"] == "/evil.example/"


def test_an_address_that_others_reach_needs_a_token_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--host", "0.0.0.0"]) == 2
    assert "--token-file" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["short", "with a space in the middle", "semi;colon;semi;colon"])
def test_a_token_is_long_and_fits_a_cookie(tmp_path: Path, text: str) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    with pytest.raises(ValueError, match="openssl rand -hex 16"):
        security.token_from(file, "0.0.0.0")
    file.write_text(f"{TOKEN}\n")
    assert security.token_from(file, "0.0.0.0") == TOKEN


def test_a_directory_that_is_not_there_is_misuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--run-dir", str(tmp_path / "nosuch")])
    assert "--run-dir: " in capsys.readouterr().err
