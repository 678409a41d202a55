"""The example that lets pretrained models go on with a text, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama as example
import pytest

import fuel_parallel as fp

Start = Callable[..., "subprocess.CompletedProcess[str]"]
GOLDEN = Path(__file__).parent.parent / "golden"


def expected(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / name / "expected.json").read_text())


def words(tokens: list[int]) -> str:
    return ",".join(map(str, tokens))


@pytest.mark.parametrize(("name", "options"), [("llama-uneven", []), ("gpt2", ["--mesh", "dp=1,tp=2"])])
def test_it_goes_on_as_transformers_does(name: str, options: list[str], start: Start) -> None:
    wanted = expected(name)
    launch = {"FUELRUN_MESH": options[1]} if options else {}
    run = start("llama.py", GOLDEN / name, "--tokens", words(wanted["tokens"][0]), "--new", 8, ranks=2, **launch)
    assert run.returncode == 0, run.stderr
    held, answer = run.stdout.splitlines()
    assert held.endswith("2 rank(s)")
    assert json.loads(answer) == wanted["greedy"]


def changed(tmp_path: Path, **keys: Any) -> Path:
    """A copy of a golden folder with other keys in its configuration."""
    folder = shutil.copytree(GOLDEN / "llama", tmp_path / "changed")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))
    return folder


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"sliding_window": 8, "use_qk_norm": True}, "the model does not know sliding_window, use_qk_norm"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; the model knows 'silu' only"),
        ({"model_type": "mamba"}, "model_type is 'mamba'; known are llama, gpt2"),
        ({"num_hidden_layers": "2"}, r"Expected `int`, got `str` - at `$.num_hidden_layers`"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2}}, "scaling of type 'yarn' is not known"),
        ({"intermediate_size": 81}, "6 mismatched: model.layers.0.mlp.gate_proj.weight (there bfloat16[80, 48], here"),
        ({"num_hidden_layers": 3}, "9 missing: model.layers.2.input_layernorm.weight (for layers.2.input_layernorm.w"),
    ],
)
def test_configurations_that_it_refuses(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(fp.FuelError, match=re.escape(message)):
        example.load(changed(tmp_path, **keys), fp.IdentityComm())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "1,two"], "--tokens: expected numbers with commas between them; got '1,two'"),
        (["--tokens", "1,97"], "--tokens: the model knows 0 to 96; got [1, 97]"),
        (["--tokens", "1", "--new", "64"], "1 tokens and --new 64: the model was made for 1 to 64 in all"),
    ],
)
def test_prompts_that_it_refuses(options: list[str], message: str, start: Start) -> None:
    run = start("llama.py", GOLDEN / "gpt2", *options)
    assert run.returncode == 2
    assert run.stderr == f"llama.py: {message}\n"


def test_a_text_is_cut_into_tokens_and_put_together_again(start: Start, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    folder = shutil.copytree(GOLDEN / "gpt2", tmp_path / "gpt2")
    missing = start("llama.py", folder, "--prompt", "t1")
    assert missing.returncode == 2
    assert "tokenizer.json: there is no such file; --tokens does without" in missing.stderr
    model = tokenizers.models.WordLevel({f"t{i}": i for i in range(97)}, unk_token="t0")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    wanted = expected("gpt2")
    prompt = " ".join(f"t{token}" for token in wanted["tokens"][0])
    run = start("llama.py", folder, "--prompt", prompt, "--new", 8)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1].endswith(" ".join(f"t{token}" for token in wanted["greedy"]))
