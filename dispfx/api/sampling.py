"""`sample`: let a decoder write text to learn from."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dispfx.deploy.folder import refuse_existing
from dispfx.files.disk import replacing
from dispfx.report import NullObserver, Observer
from dispfx.run.opening import open_model
from dispfx.run.run_text import TextChoice, open_text
from dispfx.run.sampled_text import fitted_sampling, sampled_text
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
            openings from.

    Returns:
        The file: int32 token ids (N,) named `tokens`.

    Raises:
        UnknownSettingError: if one of `changes` is no setting.
        OutputError: if the file exists, or has another ending.
        DataError: if the text cannot be used, or the decoder has no token to begin with.
    """
    settings = SampleSettings.given(model, changes | ({} if out is None else {"out": out}))
    path = refuse_existing(settings.sampling.path)
    stages, chosen = Stages(observer or NullObserver()), TextChoice(settings.text)
    with stages("open"):
        chosen.check()
        source = open_model(settings.model)
        text = open_text(source, chosen)
    stages.say(text.notes)
    asked = fitted_sampling(settings.sampling, source)
    openings = torch.cat(text.learn) if text.learn else None
    written: list[torch.Tensor] = []
    done = 0
    with stages("sample"):
        for ids_BT in sampled_text(source, openings, asked):
            written.append(ids_BT.flatten().to(torch.int32))
            done = min(asked.tokens, done + ids_BT.numel())
            stages.observer.working("sampling", done, asked.tokens, "")
    with replacing(path) as partial:
        save_file({TOKENS: torch.cat(written)[: asked.tokens]}, partial)
    return path
