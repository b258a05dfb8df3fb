"""Records of a batch's output files: plain results, OpenAI's format, EvalPlus samples, and errors.

Records contain no timestamps, so a repeated run writes the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from launch.batches.lines import BadLine, Line
from launch.openai.answers import DECIMALS, answer, choice, logprobs, usage
from runtime import CompletionBuilder, DiffusionConfig, RowRequest, RowResult, TextTokenizer

# Key of a record of results.jsonl: the id of a line and the index of a sample, or None for all samples in one record.
Key = tuple[str, int | None]

# The last field of every result.
DIGEST = "digest"
_INVALID = "invalid_request"
_FENCED = re.compile(r"```[\w+-]*\n(.*?)(?:```|\Z)", re.DOTALL)


def keys(line: Line) -> list[Key]:
    """Return the keys of a line's records in results.jsonl: (id, index of the completion), or (id, None).

    A line in diffumesh's own format has a record per completion, an OpenAI batch request one record for all of them.
    """
    return [(line.id, sample) for sample in range(line.samples)] if line.form == "plain" else [(line.id, None)]


def key_of(record: Any) -> Key | None:
    """Return the key of a record of results.jsonl; None if it is not a result."""
    if not isinstance(record, dict):
        return None
    identity, index = record.get("custom_id", record.get("id")), record.get("index")
    if not isinstance(identity, str) or not isinstance(index, (int, type(None))):
        return None
    return identity, None if "custom_id" in record else index


def as_bits(done: Collection[Key], order: Sequence[Key]) -> str:
    """Encode which results exist as one bit per result of ``order``, in hexadecimal.

    The keys of millions of results would be too long for a message between hosts.
    """
    return np.packbits([key in done for key in order]).tobytes().hex() if done else ""


def of_bits(bits: str, order: Sequence[Key]) -> set[Key]:
    """Return the keys whose results exist, from a text that :func:`as_bits` made with the same ``order``."""
    found = np.unpackbits(np.frombuffer(bytes.fromhex(bits), np.uint8))
    return {order[index] for index in np.flatnonzero(found).tolist()}


def as_line(record: Mapping[str, Any]) -> bytes:
    """Encode a record as one line of a JSON Lines file."""
    return json.dumps(record, ensure_ascii=False, separators=(", ", ": ")).encode() + b"\n"


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Add a digest to a result, so that the next run can check it."""
    return {**record, DIGEST: hashlib.blake2b(as_line(record), digest_size=8).hexdigest()}


def is_sealed(line: bytes, record: Mapping[str, Any]) -> bool:
    """Whether a line is exactly what is written for the record that was read from it, with its digest.

    Other white space or escapes would not change the record, but would change the sorted results.
    """
    try:
        return as_line(sealed({name: value for name, value in record.items() if name != DIGEST})) == line
    except (UnicodeError, RecursionError):  # a lone surrogate or deep nesting, which no result has
        return False


def sample_record(
    line: Line, request: RowRequest, result: RowResult, index: int, completions: CompletionBuilder
) -> dict[str, Any]:
    """Return the record of one sample in the plain format."""
    completion = completions.build(
        result.sequence,
        line.tokens,
        index=index,
        seed=request.seed,
        stop=line.stop,
        log_probabilities=result.log_probabilities,
    )
    record: dict[str, Any] = {
        "id": line.id,
        "index": index,
        "text": completion.text,
        "tokens": completion.tokens,
        "finish_reason": completion.finish_reason,
        "seed": completion.seed,
    }
    if isinstance(request.config, DiffusionConfig):
        record["masks_left"] = completion.masks_left
    if completion.filled_prompt is not None:
        record["filled_prompt"] = completion.filled_prompt
    if completion.log_probabilities is not None:
        record["log_probabilities"] = [round(value, DECIMALS) for value in completion.log_probabilities]
    return record


def openai_record(
    line: Line, samples: Sequence[Mapping[str, Any]], tokenizer: TextTokenizer, model_name: str
) -> dict[str, Any]:
    """Return the record of an OpenAI line, in the format of OpenAI's batches, from the plain records of its samples."""
    chat = line.form == "chat"
    choices, made = [], 0
    for sample in samples:
        kept = sample.get("log_probabilities")
        own = None if kept is None else logprobs(tokenizer, sample["tokens"], kept, chat)
        choices.append(choice(sample["index"], sample["text"], sample["finish_reason"], own, chat))
        made += len(sample["tokens"])
    # The creation time is 0, because a time would make two runs differ.
    body = answer(f"cmpl-{line.id}", 0, model_name, choices, chat) | {
        "usage": usage(line.request(line.seed).given, made)
    }
    response = {"status_code": 200, "request_id": f"req-{line.id}", "body": body}
    return {"id": f"batch_req-{line.id}", "custom_id": line.id, "response": response, "error": None}


def error_record(bad: BadLine) -> dict[str, Any]:
    """Return the error record of an invalid line."""
    return {"id": bad.id, "line": bad.number, "error": {"code": _INVALID, "message": bad.message}}


def failure_record(line: Line, key: Key, code: str, message: str) -> dict[str, Any]:
    """Return the error record of a result that cannot be computed; ``code`` names the reason for programs."""
    place = {} if key[1] is None else {"index": key[1]}
    return {"id": line.id, "line": line.number, **place, "error": {"code": code, "message": message}}


def is_error(record: Mapping[str, Any]) -> bool:
    """Whether a record of errors.jsonl is one that :func:`error_record` or :func:`failure_record` may have returned."""
    error, identity, index = record.get("error"), record.get("id"), record.get("index")
    if not isinstance(error, dict) or not isinstance(error.get("code"), str):
        return False
    named = isinstance(identity, str) or (identity is None and error["code"] == _INVALID)
    return named and (index is None or (isinstance(index, int) and not isinstance(index, bool)))


def key_of_error(record: Mapping[str, Any]) -> Key | None:
    """Return the key of the result that :func:`failure_record` is about; None for other records."""
    if not is_error(record) or record["error"]["code"] == _INVALID:
        return None
    return record["id"], record.get("index")


def evalplus_records(record: Mapping[str, Any], chats: Collection[str]) -> list[dict[str, str]]:
    """Return the EvalPlus samples for a record of results.jsonl, given the ids of the lines that are chats.

    A raw completion continues the prompt of the task. A chat's answer is a complete solution: its first fenced code
    block, or the whole answer if it has none.
    """
    if "custom_id" in record:
        choices = record["response"]["body"]["choices"]
        texts = [choice["message"]["content"] if "message" in choice else choice["text"] for choice in choices]
        identity = record["custom_id"]
    else:
        texts, identity = [record["text"]], record["id"]
    if identity not in chats:
        return [{"task_id": identity, "completion": text} for text in texts]
    blocks = [_FENCED.search(text) for text in texts]
    return [
        {"task_id": identity, "solution": block.group(1) if block else text}
        for text, block in zip(texts, blocks, strict=True)
    ]
