"""One plain decoder compiled once for all tests of the public functions."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import dispfx.api
from dispfx.ir.program import Program
from dispfx.learning.records import StepRecord
from dispfx.report import NullObserver, Report
from dispfx.settings.learning_settings import LearnSettings
from dispfx.verification.equivalence import Verification
from tests.learning_options import options_of
from tests.plain_decoders import VOCABULARY
from tests.source.conftest import decoder_folder as decoder_folder

# package.module:function, as a user names it on the command line.
MODEL = "tests.api.plain:build_decoder"
SETTINGS = LearnSettings(steps=3, seq_len=16, batch_size=2, save_every=2)
RATIO = 0.3


@dataclass
class Watcher(NullObserver):
    """Keeps what the compiler tells."""

    notes: list[str] = field(default_factory=list)
    stages: list[str] = field(default_factory=list)
    verified_lines: list[Verification] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    printed_names: list[str] = field(default_factory=list)
    programs: list[Program] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def stage(self, name: str, seconds: float | None = None) -> None:
        if seconds is not None:
            self.stages.append(name)

    def verified(self, verification: Verification) -> None:
        self.verified_lines.append(verification)

    def learning(self, record: StepRecord) -> None:
        self.steps.append(record.step)

    def printed(self, name: str, graph: str) -> None:
        self.printed_names.append(name)

    def found(self, program: Program) -> None:
        self.programs.append(program)

    def finished(self, report: Report) -> None:
        self.reports.append(report)


def random_tokens(count: int = 600, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token file, the form of a text for a decoder without a tokenizer."""
    path = tmp_path_factory.mktemp("text") / "tokens.safetensors"
    save_file({"tokens": random_tokens()}, path)
    return path


@dataclass(frozen=True)
class Compiled:
    """An output folder, its report and what was told on the way."""

    path: Path
    report: Report
    watcher: Watcher


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory, tokens: Path) -> Compiled:
    path, watcher = tmp_path_factory.mktemp("plain") / "out", Watcher()
    settings = dispfx.api.RunSettings.of(
        model=MODEL, ratio=RATIO, out=path, data=tokens, align=1, **options_of(SETTINGS)
    )
    report = dispfx.api.run_compile(settings, watcher, command="the command")
    return Compiled(path, report, watcher)
