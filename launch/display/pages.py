"""What the pages for people share: one style, one way for text to get in, and a policy that lets nothing else run."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources


def page_template(package: str, name: str) -> str:
    """A page of a package, with ``pages.css`` and ``pages.js`` where it says ``{{style}}`` and ``{{script}}``."""

    def read(package: str, name: str) -> str:
        return resources.files(package).joinpath(name).read_text(encoding="utf-8").rstrip("\n")

    page = read(package, name) + "\n"
    return page.replace("{{style}}", read("launch.display", "pages.css")).replace(
        "{{script}}", read("launch.display", "pages.js")
    )


def content_security_policy(template: str) -> str:
    """The policy under which a browser runs the template's script and style and nothing else, and loads nothing."""

    def digest(element: str) -> str:
        [source] = re.findall(rf"<{element}>(.*?)</{element}>", template, re.DOTALL)
        return base64.b64encode(hashlib.sha256(source.encode("utf-8")).digest()).decode("ascii")

    return (
        f"default-src 'none'; script-src 'sha256-{digest('script')}'; style-src 'sha256-{digest('style')}'; "
        "base-uri 'none'; form-action 'none'"
    )
