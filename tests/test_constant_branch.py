"""A decoder of nobody's library with a branch that is not silent without its weights.

x ← x + up-down(norm(x))           an ordinary MLP
x ← x + cos(turn(norm(x))) / 4     cos(0) = 1: what it writes cannot be cut with its weights
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dispfx
from dispfx import api
from dispfx.settings.learning_settings import LearnSettings
from tests.command_line import run
from tests.learning_options import options_of
from tests.plain_decoders import perturb

WIDTH, INNER, VOCABULARY = 24, 40, 59


class Wave(nn.Module):
    def __init__(self):
        super().__init__()
        self.turn = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.turn(x).cos() / 4


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Waves(nn.Module):
    def __init__(self, layers: int = 2):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.mlps = nn.ModuleList(MLP() for _ in range(layers))
        self.waves = nn.ModuleList(Wave() for _ in range(layers))
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2 * layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        norms = iter(self.norms)
        for mlp, wave in zip(self.mlps, self.waves, strict=True):
            x = x + mlp(next(norms)(x))
            x = x + wave(next(norms)(x))
        return self.head(x)


def decoder() -> nn.Module:
    """Return it, seeded."""
    torch.manual_seed(0)
    return perturb(Waves())


def test_the_write_is_refused_with_reason_parameter_and_line_and_the_rest_is_cut():
    program = dispfx.capture(decoder())
    assert [refusal.name for refusal in program.refused] == ["waves.0.turn.write", "waves.1.turn.write"]
    for layer, refusal in enumerate(program.refused):
        assert refusal.reason.startswith("aten.cos of zero is not zero")
        assert refusal.parameter == f"waves.{layer}.turn.weight"
        assert refusal.source is not None and "test_constant_branch.py:" in refusal.source
    assert [branch.sites for branch in program.branches if branch.name == "waves.0.turn"] == [
        ("waves.0.turn.read",)
    ]
    assert {site.branch for site in program.sites} == {"mlps.0", "waves.0.turn", "mlps.1", "waves.1.turn"}


def test_it_compiles_with_every_verification_and_names_what_stays(tmp_path: Path):
    tokens = torch.randint(VOCABULARY, (600,), generator=torch.Generator().manual_seed(0))
    report = api.compile(
        "tests.test_constant_branch:decoder",
        0.3,
        data=tokens,
        out=tmp_path / "out",
        **options_of(LearnSettings(steps=3, seq_len=16)),
        align=1,
    )
    assert all(line.holds for line in report.verify)
    assert {"lowered = zeroed", "removed is unread"} <= {line.name for line in report.verify}
    assert [entry.name for entry in report.refused] == ["waves.0.turn.write", "waves.1.turn.write"]


@pytest.mark.parametrize(
    ("skip", "code"), [((), 0), (("mlps.*", "waves.*"), 2)], ids=["some left", "nothing left"]
)
def test_the_exit_code_is_two_only_when_nothing_is_left(skip: tuple[str, ...], code: int):
    options = [word for pattern in skip for word in ("--skip", pattern)]
    result = run("inspect", "tests.test_constant_branch:decoder", *options)
    assert result.exit_code == code, result.output
