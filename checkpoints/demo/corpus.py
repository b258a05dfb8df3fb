"""The demo's tokenizer, and the part of its corpus that people wrote: short functions of the standard library.

Every function is written in one way only (`ast.unparse`: no comments, no docstring, no decorators, methods moved to
the top level), so that a model of a few million parameters spends its capacity on Python and not on formatting.
The held-out split is by hash of the qualified name, so the same function taken from two Python versions lands on
one side; a held-out text that also occurs on the training side under another name is dropped from the held-out side.
Nothing here touches a device; training is in `checkpoints.demo.train`.
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

# A newline with its indent is one piece (a token for each depth), a word carries the space or underscore before it, so
# that names are read word by word; digits stand alone, so that numbers are copied digit by digit.
PIECES = r"\n *|[ _]?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]+| +|\s"

MAXIMUM_CHARACTERS = 500  # first, cheap filters; the limit in tokens decides
MAXIMUM_LINES = 60
HELD_OUT_SHARE = 0.02
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "data", "badsyntax"}


@dataclass(frozen=True)
class Function:
    """One normalised function: `text` is `signature` + body, `signature` ends after the colon, newline and indent."""

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
    """The running interpreter's own standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def _definitions(node: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yields (qualified name, definition) of functions and methods; nested functions stay in their parent."""
    for child in node.body:
        if isinstance(child, ast.FunctionDef):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _definitions(child, prefix + child.name + ".")


def _is_docstring(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _is_empty(body: list[ast.stmt]) -> bool:
    """True for bodies that teach nothing: `pass`, `...` and a bare `raise NotImplementedError`."""
    if len(body) != 1:
        return not body
    only = body[0]
    if isinstance(only, ast.Pass) or (isinstance(only, ast.Expr) and isinstance(only.value, ast.Constant)):
        return True
    return isinstance(only, ast.Raise) and only.exc is not None and "NotImplementedError" in ast.unparse(only.exc)


def normalise(definition: ast.FunctionDef) -> tuple[str, str] | None:
    """Returns (signature, text) of a function in its one form, or None when there is nothing to learn from it."""
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
    """A number in [0, 1) that depends on the text only."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def source_files(folders: Iterable[Path]) -> Iterator[tuple[Path, bool]]:
    """Yields (file, whether it belongs to a test suite) in a fixed order."""
    for folder in folders:
        for directory, subfolders, names in os.walk(folder):
            subfolders[:] = sorted(set(subfolders) - SKIPPED_FOLDERS)
            for name in sorted(names):
                if name.endswith(".py"):
                    path = Path(directory, name)
                    yield path, any("test" in part for part in path.relative_to(folder).parts)


def read_functions(folders: Iterable[Path]) -> list[Function]:
    """All distinct short functions below the folders; files that this interpreter cannot parse are skipped."""
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
            # The training side wins a text that both sides have: held-out text must not have been trained on.
            if known is None or (known.held_out and not held_out):
                found[text] = Function(name, signature, text, is_test, held_out)
    return list(found.values())


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE of `vocabulary` tokens, Dream's special tokens among them."""
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
    """The id of a token that the vocabulary must have."""
    number = tokenizer.token_to_id(token)
    if number is None:
        raise ValueError(f"the vocabulary has no {token}")
    return number
