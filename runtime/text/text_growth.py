"""How much longer a tokenizer can make a text, from the parts of its ``tokenizer.json`` that rewrite texts.

The tokenizers library sets no limit: a few replacements of a letter by many make terabytes of a short prompt, and then
it aborts the process.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from checkpoints.local_files import parse_json_object

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# The parts of ALBERT's and XLNet's tokenizers could make a text about 2,000 times longer, if each met its worst text
# in what the part before it makes. Those of most models could make it less than 20 times longer.
MAX_GROWTH = 4096

_LISTS = {"normalizers", "pretokenizers", "decoders"}
# The largest ratio of bytes after to bytes before, for parts that add text. For the Unicode forms, see the FAQ of
# UAX 15. BERT's may make spaces around each Chinese character, NFD and lower case.
_GROWTHS = {
    "NFC": 3.0,
    "NFD": 3.0,
    "NFKC": 11.0,
    "NFKD": 11.0,
    "Lowercase": 1.5,
    "BertNormalizer": 9.0,
    "CTC": 2.0,
    "BPEDecoder": 2.0,
    "WordPiece": 2.0,
}
# Expressions that never match an empty text: characters and classes, each once or repeated at least once.
_NOT_EMPTY = re.compile(
    r"((\\[sSdDwW]|\\[pP]\{\w+\}|\[([^\[\]\\]|\\.)+\]|[^\\\[\](){}|?*+^$])(\+|\{[1-9]\d*(,\d*)?\})?)+"
)


def text_growth(library: Tokenizer) -> float:
    """Return how many times longer a tokenizer can make a text, in bytes: the larger one of encoding and decoding.

    It is an upper limit, which the parts of real tokenizers do not reach together.

    Raises:
      ValueError: a part is nested too deeply, or its map of characters is not base64.
    """
    encoding = [_growth(part) for part in (library.normalizer, library.pre_tokenizer)]
    return max(math.prod(encoding), _growth(library.decoder))


def _growth(part: Any) -> float:
    return 1.0 if part is None else _growth_of(parse_json_object(part.__getstate__()))


def _growth_of(part: Mapping[str, Any]) -> float:
    """Return the growth of a part, given as in ``tokenizer.json``."""
    kind = part["type"]
    if kind == "Sequence":
        return math.prod(_growth_of(one) for key in _LISTS & part.keys() for one in part[key])
    if kind == "Replace":
        return _growth_of_replace(part["pattern"], len(part["content"].encode()))
    if kind == "Prepend":
        return 1.0 + len(part["prepend"].encode())
    if kind == "Metaspace":
        return 1.0 + len(part["replacement"].encode())
    if kind == "ByteLevel":
        return 3.0 if part.get("add_prefix_space") else 2.0
    if kind == "Precompiled":
        return _growth_of_map(base64.b64decode(part["precompiled_charsmap"]))
    return _GROWTHS.get(kind, 1.0)


def _growth_of_replace(pattern: Mapping[str, str], content: int) -> float:
    if pattern.get("String"):
        return max(1.0, content / len(pattern["String"].encode()))
    # An empty match, between two characters, is replaced too.
    return max(1.0, content) if _NOT_EMPTY.fullmatch(pattern.get("Regex", "")) else 1.0 + content


def _growth_of_map(table: bytes) -> float:
    """Return the growth of SentencePiece's map of characters: the size of a trie, the trie, and texts that end with 0.

    The longest text of the usual maps has 33 bytes, and replaces three bytes, as in NFKC.
    """
    start = 4 + int.from_bytes(table[:4], "little")
    longest = max(map(len, table[start:].split(b"\0")))
    return float(longest) if longest > 33 else 11.0
