"""Two pruned decoders and a dense one in one process: in turn, in threads at the same time, and after a fork.

    python -m tests.trust.several_decoders

Prints what differed from their answers one by one, as JSON.
"""

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

import dispfx
from dispfx.api.compilation import apply
from tests.tiny_transformers import VOCABULARY, tiny_transformer

THREADS, ROUNDS, TOKENS = 6, 4, 12
Answer = Callable[[], Tensor]
# The child takes a few; one that hangs is ended by SIGALRM, and told by its exit code.
_LONGEST_SECONDS = 120


def main() -> int:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        answers = _answers(Path(folder))
    expected = {name: answer() for name, answer in answers.items()}
    differing = {
        "in turn": _differing(answers, expected),
        "in threads": _in_threads(answers, expected),
        "after a fork": _after_a_fork(answers, expected),
    }
    print(json.dumps({"decoders": len(answers), "differing": differing}))
    return int(any(differing.values()))


def _answers(folder: Path) -> dict[str, Answer]:
    """Return what generates with each decoder, and what gives its logits for a batch."""
    models: dict[str, nn.Module] = {"dense gpt2": tiny_transformer("gpt2")}
    for name, ratio in (("llama", 0.5), ("qwen3", 0.3)):
        dense = tiny_transformer(name)
        out = folder / name
        apply(dense, dispfx.Plan.random(dispfx.capture(dense), ratio, 3), out=out, export="none")
        models[f"pruned {name}"] = dispfx.load(out)
        models[f"dense {name}"] = dense
    found: dict[str, Answer] = {}
    for index, (name, model) in enumerate(models.items()):
        ids = torch.randint(VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(index))
        found[f"{name}: tokens"] = _generating(model, ids)
        found[f"{name}: logits"] = _computing(model, ids)
    return found


def _generating(model: nn.Module, ids: Tensor) -> Answer:
    def generate() -> Tensor:
        mask = torch.ones_like(ids)
        return model.generate(  # pyright: ignore[reportCallIssue]
            ids, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0
        )

    return generate


def _computing(model: nn.Module, ids: Tensor) -> Answer:
    def compute() -> Tensor:
        with torch.no_grad():
            return model(ids).logits

    return compute


def _differing(answers: dict[str, Answer], expected: dict[str, Tensor]) -> list[str]:
    return [name for name, answer in answers.items() if not torch.equal(answer(), expected[name])]


def _in_threads(answers: dict[str, Answer], expected: dict[str, Tensor]) -> list[str]:
    names = list(answers) * ROUNDS
    before = _threads()
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(lambda name: answers[name](), names))
    # A thread that is still ending may hold a lock of the C library, which a fork would keep for ever.
    while _threads() > before:
        time.sleep(0.01)
    return [
        name for name, tensor in zip(names, found, strict=True) if not torch.equal(tensor, expected[name])
    ]


def _threads() -> int:
    """Return how many threads the system knows of this process; Python's own count ends too early."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else threading.active_count()


def _after_a_fork(answers: dict[str, Answer], expected: dict[str, Tensor]) -> list[str]:
    """Let a child answer while its parent does."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        # The fork has lost torch's threads; they must be replaced before they are used.
        torch.set_num_threads(1)
        signal.alarm(_LONGEST_SECONDS)
        found = _differing(answers, expected)
        os.write(writer, json.dumps(found).encode())
        os._exit(0)
    os.close(writer)
    own = _differing(answers, expected)
    with os.fdopen(reader) as pipe:
        told = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return own + (json.loads(told) if code == 0 else [f"the child ended with {code}"])


if __name__ == "__main__":
    sys.exit(main())
