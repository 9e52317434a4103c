"""A file of any size is read in little memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.source.text.large_files import LINE, READ_BYTES, TOKENS

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    words = [sys.executable, "-m", "tests.source.text.large_files", str(tmp_path_factory.mktemp("large"))]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_hundred_gibibytes_of_text_are_read_in_bounded_memory(figures: dict[str, Any]):
    found = figures["text"]
    assert found["name"] == "crawl.txt (8.0 MiB of 100.0 GiB)"
    # Every piece gives up the parts of a line at its two ends, and the tokenizer has one token a byte.
    assert READ_BYTES - 16 * 2 * len(LINE) <= found["tokens"] <= READ_BYTES
    assert LINE[:9] in found["text"] and "\0" not in found["text"]
    # The tokenizer's working memory for 4 Mi characters, here 4 Mi tokens: 0.8 GB were measured.
    assert found["grown_bytes"] < 1.3e9


@pytest.mark.slow
def test_forty_gigabytes_of_tokens_are_used_where_they_lie(figures: dict[str, Any]):
    found = figures["tokens"]
    assert found["tokens"] == TOKENS and found["last"] == 77 and found["total"] == 0
    # The order of 4.9 million windows takes 39 MB; the file's own pages come on top as they are read.
    assert found["grown_bytes"] < 0.3e9
