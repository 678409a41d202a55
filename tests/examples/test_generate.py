"""The example that generates: the same text on any mesh, for prompts from anywhere, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import generate as example
import pytest

import fuel_parallel as fp

Start = Callable[..., "subprocess.CompletedProcess[str]"]
GOLDEN = Path(__file__).parent.parent / "golden"


def test_a_pretrained_model_goes_on_as_in_transformers(start: Start, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    folder = shutil.copytree(GOLDEN / "llama-uneven", tmp_path / "llama")
    model = tokenizers.models.WordLevel({f"t{i}": i for i in range(97)}, unk_token="t0")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    wanted = json.loads((folder / "expected.json").read_text())
    prompt = " ".join(f"t{token}" for token in wanted["tokens"][0])
    run = start("generate.py", "--model", folder, "--prompt", prompt, "--max-tokens", 8, "--mesh", "pp=2", ranks=2)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [f"t{token}" for token in wanted["greedy"]]


def answers_in(output: str) -> dict[str, str]:
    """The texts by their numbers, put together from all lines about each."""
    found: dict[str, str] = {}
    for line in output.split("\n")[:-1]:
        name, piece = line.split("\t", 1)
        found[name] = found.get(name, "") + piece
    return found


OPTIONS = ("--max-tokens", 6, "--temperature", 1, "--n", 2, "--stop", "zz", "--dtype", "float64")


def test_prompts_from_a_file_and_as_they_are_typed(start: Start, tmp_path: Path) -> None:
    lines = ["one and the same beginning, and a", "one and the same beginning, and b", "another"]
    file = tmp_path / "prompts.txt"
    file.write_text("\n\n".join(lines))
    alone = start("generate.py", "--prompts", file, *OPTIONS, "--stats")
    assert alone.returncode == 0, alone.stderr
    answers = answers_in(alone.stdout)
    assert sorted(answers) == ["1.1", "1.2", "2.1", "2.2", "3.1", "3.2"]
    assert re.search(r"^prefix hits   32 of 73 prompt tokens, 43.8 %$", alone.stderr, re.MULTILINE)
    assert re.search(r"^preemptions   0$", alone.stderr, re.MULTILINE)
    typed = "\n".join([*lines, "", "not read"])
    shared = start("generate.py", *OPTIONS, "--mesh", "dp=2", "--kv-dtype", "float64", ranks=2, typed=typed)
    assert shared.returncode == 0, shared.stderr
    assert answers_in(shared.stdout) == answers
    streamed = start("generate.py", *OPTIONS, "--prompts", file, "--stream", "--no-prefix-cache")
    assert len(streamed.stdout.split("\n")) > len(answers) + 1
    assert answers_in(streamed.stdout) == answers


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "nowhere"], "nowhere/config.json: No such file or directory"),
        (["--model", GOLDEN / "gpt2"], "model_type is 'gpt2'; generate.py knows llama"),
        (["--prompts", "nowhere"], "--prompts nowhere: No such file or directory"),
        (["--prompts", GOLDEN / "minilm.npz"], "minilm.npz: not UTF-8: "),
        (["--prompts", "x", "--prompt", "y"], "--prompt and --prompts: say one of them"),
        (["--mesh", "ep=1"], "--mesh: the axes here are dp, pp and tp, not 'ep'"),
        (["--prompt", ""], "the prompt has no tokens"),
        (["--prompt", "x", "--max-tokens", 4096], "1 tokens and 4096 more are 4097; the model was made for 4096"),
        (["--prompt", "x", "--cache-bytes", 999], "a page takes 16384 bytes, the budget is 999"),
        (["--prompt", "x" * 99, "--cache-bytes", 99999], "takes 11 pages, but the cache has 6 of 16 tokens"),
        (["--token-budget", 8], "token_budget must be max_rows or more"),
    ],
)
def test_what_it_refuses(options: list[object], message: str) -> None:
    with pytest.raises(fp.FuelError, match=re.escape(message)):
        example.prepare.main([str(word) for word in options], standalone_mode=False)
