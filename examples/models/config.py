"""Reading config.json of a Hugging Face folder into a typed configuration, and refusing what is not understood."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fuel_parallel.errors import DataError

T = TypeVar("T")

# What says nothing about the values that a model computes.
SILENT = frozenset(
    {
        "architectures",
        "attention_dropout",
        "attn_pdrop",
        "bos_token_id",
        "dtype",
        "embd_pdrop",
        "eos_token_id",
        "initializer_range",
        "model_type",
        "n_ctx",
        "pad_token_id",
        "resid_pdrop",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "task_specific_params",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "_name_or_path",
    }
)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as reason:
        raise DataError(f"{path}: {reason.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as reason:
        raise DataError(f"{path}: expected a JSON object: {reason}") from None


def read_config(path: Path, kind: type[T], fixed: Mapping[str, Any]) -> T:
    """The configuration in a file, as a msgspec structure of the keys that a model understands.

    `fixed` are keys that are understood with one value only. Raises `DataError` with the file and all keys that are not
    understood, or with the key whose value is not.
    """
    found = {key: value for key, value in read_json(path).items() if key not in SILENT}
    known = {field.encode_name for field in msgspec.structs.fields(kind)}  # type: ignore[arg-type]
    strange = sorted(found.keys() - known - fixed.keys())
    if strange:
        raise DataError(f"{path}: the model does not know {', '.join(strange)}; its values would not be right without")
    for key, value in fixed.items():
        if found.get(key, value) != value:
            raise DataError(f"{path}: {key} is {found[key]!r}; the model knows {value!r} only")
    try:
        return msgspec.convert({key: value for key, value in found.items() if key in known}, kind)
    except msgspec.ValidationError as reason:
        raise DataError(f"{path}: {reason}") from None
