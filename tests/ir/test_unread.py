"""Parts of a decoder that its logits do not depend on are said, counted and kept."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dispfx
from dispfx import api
from dispfx.deploy.exported import load_program
from dispfx.ir.program import unread_parts
from dispfx.settings.learning_settings import LearnSettings
from tests.learning_options import options_of
from tests.one_branch import VOCABULARY, WIDTH, Middle
from tests.plain_decoders import perturb


class TwoOutputs(nn.Module):
    """Predicts the token after the next one as well, by a layer and a scale of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.mlp = Middle(lambda m, h: F.gelu(h * m.scale))
        self.second = nn.ModuleDict({"mlp": Middle(lambda m, h: F.gelu(h * m.scale))})
        self.second_scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(ids)
        x = x + self.mlp(x)
        return self.head(x), self.head(self.second_scale * (x + self.second["mlp"](x)))


def two_outputs() -> nn.Module:
    torch.manual_seed(0)
    return perturb(TwoOutputs())


def test_every_part_is_named_with_its_size():
    model = two_outputs()
    program = dispfx.capture(model)
    assert program.size == sum(tensor.numel() for tensor in model.parameters())
    assert not program.refused
    second = sum(tensor.numel() for tensor in model.get_submodule("second").parameters())
    found = {refusal.name: refusal.reason for refusal in program.left_dense}
    assert set(found) == {"second", "second_scale"}
    assert found["second"].startswith("not read for the logits, one of 2 outputs of that shape")
    assert f"{second:,} parameters" in found["second"]


def test_the_written_folder_and_its_report_have_them(tmp_path: Path):
    model = two_outputs()
    report = api.compile(
        model,
        0.3,
        data=torch.randint(VOCABULARY, (600,), generator=torch.Generator().manual_seed(0)),
        out=tmp_path / "out",
        **options_of(LearnSettings(method="random", seq_len=16)),
        align=1,
    )
    assert report.parameters.dense == sum(tensor.numel() for tensor in model.parameters())
    program = dispfx.capture(model)
    plan = dispfx.Plan.load(tmp_path / "out" / "plan.safetensors")
    lowered = dispfx.lower(program, plan)
    assert report.parameters.pruned == sum(tensor.numel() for tensor in lowered.parameters())
    assert {entry.name for entry in report.refused} == {"second", "second_scale"}
    kept = load_program(tmp_path / "out").state_dict()
    for path, tensor in model.get_submodule("second").named_parameters(prefix="second"):
        assert torch.equal(kept[path], tensor), path


def test_a_part_is_the_largest_module_of_which_nothing_is_read():
    parts = unread_parts({"a.b.c": 2, "a.b.d": 3, "a.e.f": 5, "g.h": 7}, ["a.e.g", "i"], 1)
    assert [part.name for part in parts] == ["a.b", "a.e.f", "g"]
    assert parts[0].reason == "not read for the logits; 5 parameters are kept as they are"
