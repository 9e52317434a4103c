"""What a dry run says."""

from dataclasses import replace
from pathlib import Path

from dispfx.plan.budget import Budget
from dispfx.plan.plan import CacheLeft, Met
from dispfx.report.run_preview import Preview, preview_lines, preview_plain
from dispfx.settings.learning_settings import LearnSettings
from dispfx.settings.recovery_settings import RecoverySettings
from tests.report.test_estimate import estimate
from tests.report.test_sites import program


def example_preview() -> Preview:
    """Return one with every field in use."""
    return Preview(
        program=program(refused=1),
        settings=LearnSettings(steps=100, batch_size=2, seq_len=50),
        estimate=estimate(),
        budget=Budget(0.3, align=8),
        recovery=RecoverySettings(train="scales", steps=600, batch_size=8, seq_len=512),
        reachable=0.3004,
        cache=None,
        met=(),
        parameters=1000,
        parameters_left=760,
        tokens=20_000,
        tokens_measured=2_000,
        cpu_seconds=240.0,
        out=Path("out/x"),
        state=Path("out/x.state"),
        resumes_at=40,
    )


def test_a_preview_in_sentences():
    lines = preview_lines(example_preview(), "a plan")
    assert (
        lines[0] == "ratio: 30.00% of blocks requested, 30.04% possible with widths that are multiples of 8"
    )
    assert lines[1] == "parameters: 1,000 → about 760 (-24.0%)"
    assert lines[3].startswith("learning: 100 steps of 2 × 50 tokens, 0.5 passes over the text")
    assert "  this CPU: about 4.0 min for 100 steps" in lines
    assert "then recovery, not counted above: scales, at most 600 steps of 8 × 512 tokens" in lines
    assert lines[-2] == "would write out/x (a plan), and meanwhile out/x.state, resuming at step 40"
    card = preview_lines(replace(example_preview(), cpu_seconds=None, resumes_at=None), "a plan")
    assert not any("this CPU" in line for line in card) and card[-2].endswith("out/x.state")


def test_a_share_of_the_cache_is_said_next_to_the_ratio():
    found = replace(example_preview(), budget=Budget(0.3, align=8, kv_ratio=0.4), cache=CacheLeft(2048, 1024))
    assert preview_lines(found, "a plan")[1] == (
        "KV cache: 50.00% removed, 40.00% requested; 2,048 → 1,024 bytes per token"
    )
    fits = replace(example_preview(), met=(Met("size: 2 MB", 3_412_480, 2e6, 1_999_000),))
    assert preview_lines(fits, "a plan")[1] == "size: 2 MB: 3.412 MB → 1.999 MB"
    assert preview_plain(fits)["constraints"][0]["left"] == 1_999_000
    plain = preview_plain(found)
    assert plain["kv_ratio"] == {"requested": 0.4, "achieved": 0.5}
    assert plain["cache_bytes_per_token"] == {"dense": 2048, "pruned": 1024}
    assert "kv_ratio" not in preview_plain(example_preview())


def test_a_preview_as_data():
    plain = preview_plain(example_preview())
    assert plain["parameters"] == {"dense": 1000, "pruned": 760} and plain["resumes_at"] == 40
    assert plain["recovery"] == {"train": "scales", "steps": 600, "batch_size": 8, "seq_len": 512}
    assert len(plain["refused"]) == 1 and plain["estimate"]["steps"] == estimate().settings.steps
