"""The exported file: style, script and data in one page, of which a strict policy lets nothing else run."""

import base64
import hashlib
import html
import re
from pathlib import Path
from typing import Any

import msgspec

from infra.web.exported.bundle import bundle

EXPORTED_API = Path(__file__).parent / "api.js"
_HEAD = re.compile(
    r'<link rel="stylesheet" href="/static/style.css">\n<script type="module" src="/static/app.js"></script>\n'
)


def page(static: Path, data: dict[str, Any], told: str) -> str:
    """The page, with `told` at its top: what it holds and what not."""
    style = (static / "style.css").read_text()
    script = bundle(static / "app.js", {(static / "api.js").resolve(): EXPORTED_API})
    # Inside a script element only "<" could end the data, or begin a comment.
    text = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; base-uri 'none'; form-action 'none'"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>\n'
    index, num_heads = _HEAD.subn(lambda _: head, (static / "index.html").read_text())
    assert num_heads == 1, "index.html begins in another way"
    before, main, rest = index.partition('<main id="main"')
    content, body_end, after = rest.partition("</body>")
    notice = f'<p class="notice exported">{html.escape(told)}</p>\n'
    scripts = f'<script type="application/json" id="data">{text}</script>\n<script>{script}</script>\n'
    return f"{before}{notice}{main}{content}{scripts}{body_end}{after}"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
