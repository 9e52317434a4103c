"""`sample`: let a decoder write text to learn from."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dispfx.analysis.finite_weights import require_finite_weights, require_values
from dispfx.deploy.folder import refuse_existing
from dispfx.files.disk import make_parents, new_file
from dispfx.report import Observer
from dispfx.run.opening import open_model
from dispfx.run.run_text import TextChoice, open_text
from dispfx.run.sampled_text import Openings, fitted_sampling, require_runs, sampled_text
from dispfx.run.timed_stages import Stages
from dispfx.settings.trees import SampleSettings
from dispfx.source.text.token_file import TOKENS


@torch.inference_mode(False)
def sample(model: Any, out: Any = None, *, observer: Observer | None = None, **changes: Any) -> Path:
    """Let a decoder write text, and save it as a token file that `data` takes.

    Args:
        model: MODEL, or `SampleSettings`.
        out: file to write, `.safetensors`.
        observer: told what happens.
        changes: single settings, as in `data="text.txt", tokens=3_000_000`; `data` is a text to take
            openings from, or several texts, each as often as its `data_weight`.

    Returns:
        The file: int32 token ids (N,) named `tokens`.

    Raises:
        UnknownSettingError: if one of `changes` is no setting.
        CaptureError: if the decoder cannot run, or gives logits that are not finite.
        DataError: if the text cannot be used, or the decoder has no token to begin with.
        OutputError: if the file exists, or has another ending.
        SourceError: if a weight is not finite.
    """
    settings = SampleSettings.given(model, changes | ({} if out is None else {"out": out}))
    path = refuse_existing(settings.sampling.path)
    stages, chosen = Stages(observer), TextChoice(settings.text)
    with stages("open"):
        chosen.check()
        source = open_model(settings.model)
        text = open_text(source, chosen)
        require_values(source.model.named_parameters())
        require_finite_weights(source.model)
        asked = fitted_sampling(settings.sampling, source)
        require_runs(source, asked, text.largest)
    stages.say(text.notes)
    make_parents(path)
    written: list[torch.Tensor] = []
    done = 0
    with stages("sample"):
        for ids_BT in sampled_text(source, Openings.of(text), asked, stages.observer.note):
            written.append(ids_BT.flatten().to(torch.int32))
            done = min(asked.tokens, done + ids_BT.numel())
            stages.observer.working("sampling", done, asked.tokens, "")
    with new_file(path) as partial:
        save_file({TOKENS: torch.cat(written)[: asked.tokens]}, partial)
    return path
