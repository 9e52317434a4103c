"""One report with every field in use."""

from dispfx.report import (
    Bytes,
    Parameters,
    PerplexityChange,
    Protocol,
    Ratio,
    Refused,
    Report,
    SiteWidth,
    SkillChange,
    UngatedWeights,
)
from dispfx.verification.equivalence import Verification


def example_report() -> Report:
    """Return it."""
    return Report(
        ratio=Ratio(0.3, 0.3004, "blocks"),
        parameters=Parameters(922_112, 701_204, 736_000),
        bytes=Bytes(3_688_448, 2_804_816),
        perplexity=PerplexityChange(3.2, 3.28, Protocol("text.txt", 128, 40, 5080, 0.1)),
        verify=(
            Verification("lowered = gated", (2, 9), 3e-6, 1.2e-7, 1e-5),
            Verification("reloaded = lowered", (1, 17), 0.0, 0.0, 0.0),
        ),
        sites=(SiteWidth("layers.0.attention.read", "read", 128, 88),),
        refused=(Refused("layers.1.mlp", "a softmax over a labelled dimension"),),
        ungated=(UngatedWeights("aten.conv1d combines all features", 96, ("layers.1.conv.weight",)),),
        seed=7,
        versions={"python": "3.11.7", "torch": "2.13.0"},
        device="cpu",
        seconds={"capture": 1.5, "learn": 60.0},
        command="dispfx compile demo --ratio 0.3 --out out/demo",
        skills={"copy": SkillChange(0.95, 0.94)},
    )
