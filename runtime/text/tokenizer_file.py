"""Reading of ``tokenizer.json`` with the tokenizers library alone: importing transformers takes about a second.

transformers reads the same file with the same library. Its settings in ``tokenizer_config.json`` and in older files can
change tokens: where they might, :func:`read_tokenizer_file` leaves the folder to transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from checkpoints.folder import TEMPLATES_FOLDER, CheckpointFolder

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TOKEN_LISTS = ("additional_special_tokens", "extra_special_tokens")
# transformers reads these if ``tokenizer_config.json`` has no ``added_tokens_decoder``.
_OLDER_FILES = ("special_tokens_map.json", "added_tokens.json")
_TEMPLATE_FILE = "chat_template.jinja"
_ADDED_TOKEN_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def _is_any(value: object) -> bool:
    return True


def _is_side(value: object) -> bool:
    return value in ("left", "right")


def _is_false(value: object) -> bool:
    return value is False


# Keys of ``tokenizer_config.json``, with the values that do not change how a text is encoded without the tokens around
# it, or how tokens are decoded without a clean-up. The values of special tokens and added tokens are compared with
# ``tokenizer.json``. Any other key or value is left to transformers.
_HARMLESS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("tokenizer_class", "auto_map", "processor_class", "name_or_path", "backend", "is_local"), _is_any),
    **dict.fromkeys(("model_max_length", "clean_up_tokenization_spaces", "errors"), _is_any),
    **dict.fromkeys(("add_bos_token", "add_eos_token"), _is_any),
    **dict.fromkeys(("padding_side", "truncation_side"), _is_side),
    **dict.fromkeys(("split_special_tokens", "add_prefix_space"), _is_false),
    **dict.fromkeys(_NAMED_TOKENS, _is_any),
    **dict.fromkeys(_TOKEN_LISTS, lambda value: value is None or value == {} or isinstance(value, list)),
    "model_input_names": lambda value: isinstance(value, list),
    "chat_template": lambda value: value is None or isinstance(value, str),
    "added_tokens_decoder": lambda value: isinstance(value, dict),
}


@dataclass
class FileTokenizer:
    """A tokenizer that was read without transformers. Its attributes are named like those of transformers' tokenizers.

    Attributes:
      backend_tokenizer: the tokenizer of the tokenizers library.
      special_tokens_map: texts of the special tokens by name, such as ``eos_token``, for chat templates.
      chat_template: the chat template; None if there is none.
    """

    backend_tokenizer: Tokenizer
    special_tokens_map: dict[str, str]
    chat_template: str | None


def read_tokenizer_file(folder: CheckpointFolder) -> FileTokenizer | None:
    """Read ``tokenizer.json``, and the special tokens and the chat template beside it.

    Returns:
      The tokenizer, with the tokens and texts of transformers' ``PreTrainedTokenizerFast``; None if the folder has
      something that only transformers implements.

    Raises:
      CheckpointError: ``tokenizer_config.json`` is damaged.
      Exception: ``tokenizer.json`` is damaged; the library raises no narrower type, and may also panic.
    """
    settings = folder.read_json("tokenizer_config.json") or {}
    if not all(key in _HARMLESS and _HARMLESS[key](value) for key, value in settings.items()):
        return None
    if "added_tokens_decoder" not in settings and any((folder.path / name).is_file() for name in _OLDER_FILES):
        return None
    if (folder.path / TEMPLATES_FOLDER).is_dir():
        return None
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(folder.path / "tokenizer.json"))
    added = library.get_added_tokens_decoder()
    named = {name: _text(settings[name]) for name in _NAMED_TOKENS if settings.get(name) is not None}
    listed = [_text(token) for name in _TOKEN_LISTS for token in settings.get(name) or ()]
    special = {token.content for token in added.values() if token.special}
    # transformers adds a special token that the file lacks, and an added token that it describes differently.
    if not special.issuperset((*named.values(), *listed)) or not _has_tokens(added, settings):
        return None
    template = folder.path / _TEMPLATE_FILE
    return FileTokenizer(
        library,
        {name: text for name, text in named.items() if text is not None},
        template.read_text(encoding="utf-8") if template.is_file() else settings.get("chat_template"),
    )


def _text(token: object) -> str | None:
    """Return the text of a special token, as a string or in the form of a saved ``AddedToken``; None for others."""
    if isinstance(token, dict) and token.get("__type") == "AddedToken":
        token = token.get("content")
    return token if isinstance(token, str) else None


def _has_tokens(added: Mapping[int, AddedToken], settings: Mapping[str, Any]) -> bool:
    """Return whether ``tokenizer.json`` has the added tokens of ``tokenizer_config.json`` under the same ids."""
    found = {
        str(number): {field: getattr(token, field) for field in _ADDED_TOKEN_FIELDS} for number, token in added.items()
    }
    return all(found.get(number) == token for number, token in settings.get("added_tokens_decoder", {}).items())
