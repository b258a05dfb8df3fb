"""Parses the JSON objects of requests: lines of a batch file and bodies of HTTP requests."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from typing import Any

from runtime import InputError, JsonObjectError, parse_json_object, parse_json_objects

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_object(raw: bytes, names: int | None = None) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
      raw: JSON in UTF-8.
      names: the maximum number of names per object; None for no limit.

    Raises:
      InputError: the bytes are not UTF-8, not JSON or not an object, or an object has a name twice or too many names.
    """
    try:
        record = parse_json_object(raw, names)
        # A lone surrogate, which only an escape can produce, is not valid text.
        if _SURROGATE.search(raw):
            json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeError as error:
        raise InputError("the text is not valid UTF-8", detail=error) from error
    except JsonObjectError as error:
        raise InputError(str(error)) from error
    except ValueError as error:
        raise InputError("the text is not valid JSON", detail=error) from error
    return record


def parse_objects(lines: Sequence[bytes | None]) -> Sequence[dict[str, Any] | None]:
    """Parse lines of JSON objects. All are None if :func:`parse_object` may refuse one of them.

    Parsed together, short objects take half the time.
    """
    whole = [line for line in lines if line is not None]
    if len(whole) == len(lines) and not _SURROGATE.search(b"\n".join(whole)):
        with contextlib.suppress(ValueError):
            return parse_json_objects(whole)
    return [None] * len(lines)
