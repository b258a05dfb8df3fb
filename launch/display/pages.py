"""Shared parts of the HTML pages: style, script, and a content security policy that allows nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources


def page_template(package: str, name: str) -> str:
    """Read a page of a package and insert ``pages.css`` and ``pages.js`` for ``{{style}}`` and ``{{script}}``."""

    def read(package: str, name: str) -> str:
        return resources.files(package).joinpath(name).read_text(encoding="utf-8").rstrip("\n")

    page = read(package, name) + "\n"
    return page.replace("{{style}}", read("launch.display", "pages.css")).replace(
        "{{script}}", read("launch.display", "pages.js")
    )


def content_security_policy(template: str) -> str:
    """Return a content security policy: only the template's own script and style, and no network requests."""

    def digest(element: str) -> str:
        [source] = re.findall(rf"<{element}>(.*?)</{element}>", template, re.DOTALL)
        return base64.b64encode(hashlib.sha256(source.encode("utf-8")).digest()).decode("ascii")

    return (
        f"default-src 'none'; script-src 'sha256-{digest('script')}'; style-src 'sha256-{digest('style')}'; "
        "base-uri 'none'; form-action 'none'"
    )
