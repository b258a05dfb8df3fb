"""The demo's tokenizer, and the human-written part of its corpus: short functions of the standard library.

Every function is normalised with `ast.unparse`: no comments, docstrings or decorators, and methods become top-level
functions. A small model then spends its capacity on Python and not on formatting. The hash of the qualified name
decides whether a function is held out, so a function that two Python versions share is always in the same split.
A held-out function whose text also occurs in the training split is dropped.
"""

import ast
import hashlib
import os
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"
# Dream's special tokens, in the order of its tokenizer.
SPECIAL_TOKENS = (END, "<|im_start|>", "<|im_end|>", "<|beginoftext|>", "<|mask|>", "<|dlm_pad|>")
MASK = "<|mask|>"
PAD = "<|dlm_pad|>"

# A newline and its indent are one piece, so each depth has a token. A word includes the space or underscore before it,
# so names are split into words. Each digit is a piece, so numbers are copied digit by digit.
PIECES = r"\n *|[ _]?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]+| +|\s"

MAXIMUM_CHARACTERS = 500  # cheap filters; Corpus applies the limit in tokens later
MAXIMUM_LINES = 60
HELD_OUT_SHARE = 0.02
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "data", "badsyntax"}


@dataclass(frozen=True)
class Function:
    """A normalised function. `signature` includes the colon, newline and first indent; `text` adds the body."""

    name: str
    signature: str
    text: str
    is_test: bool
    held_out: bool

    @property
    def body(self) -> str:
        """The text after the signature."""
        return self.text[len(self.signature) :]


def standard_library() -> Path:
    """Return the folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def _definitions(node: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield (qualified name, definition) of functions and methods; nested functions are part of their parent."""
    for child in node.body:
        if isinstance(child, ast.FunctionDef):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _definitions(child, prefix + child.name + ".")


def _is_docstring(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _is_empty(body: list[ast.stmt]) -> bool:
    """Whether a body is only `pass`, `...`, a constant, or `raise NotImplementedError`."""
    if len(body) != 1:
        return not body
    only = body[0]
    if isinstance(only, ast.Pass) or (isinstance(only, ast.Expr) and isinstance(only.value, ast.Constant)):
        return True
    return isinstance(only, ast.Raise) and only.exc is not None and "NotImplementedError" in ast.unparse(only.exc)


def normalise(definition: ast.FunctionDef) -> tuple[str, str] | None:
    """Return (signature, text) of a function after normalisation; None if it is empty, too long or not ASCII."""
    if (definition.end_lineno or 0) - definition.lineno > MAXIMUM_LINES:
        return None
    for node in ast.walk(definition):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            node.body = [s for i, s in enumerate(node.body) if i or not _is_docstring(s)] or [ast.Pass()]
    definition.decorator_list = []
    if _is_empty(definition.body):
        return None
    text = ast.unparse(definition)
    head = ast.unparse(ast.FunctionDef(**{**vars(definition), "body": [ast.Pass()]}))
    signature = head.removesuffix("pass")
    if len(text) > MAXIMUM_CHARACTERS or not text.isascii() or not text.startswith(signature):
        return None
    return signature, text


def _share(text: str) -> float:
    """Return a number in [0, 1) that depends only on the text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def source_files(folders: Iterable[Path]) -> Iterator[tuple[Path, bool]]:
    """Yield (file, whether it belongs to a test suite) in a fixed order."""
    for folder in folders:
        for directory, subfolders, names in os.walk(folder):
            subfolders[:] = sorted(set(subfolders) - SKIPPED_FOLDERS)
            for name in sorted(names):
                if name.endswith(".py"):
                    path = Path(directory, name)
                    yield path, any("test" in part for part in path.relative_to(folder).parts)


def read_functions(folders: Iterable[Path]) -> list[Function]:
    """Return all distinct short functions below the folders. Files that this interpreter cannot parse are skipped."""
    found: dict[str, Function] = {}
    for path, is_test in source_files(folders):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in old sources
                tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError):
            continue
        for name, definition in _definitions(tree):
            normalised = normalise(definition)
            if normalised is None:
                continue
            signature, text = normalised
            held_out = _share(name) < HELD_OUT_SHARE
            known = found.get(text)
            # A text that occurs in both splits is kept only in the training split: held-out texts must be unseen.
            if known is None or (known.held_out and not held_out):
                found[text] = Function(name, signature, text, is_test, held_out)
    return list(found.values())


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer with ``vocabulary`` tokens, including Dream's special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token; the vocabulary must have it."""
    number = tokenizer.token_to_id(token)
    if number is None:
        raise ValueError(f"the vocabulary has no {token}")
    return number
