"""A pruned folder → the transformers model in it."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from dispfx.errors import DataError, DispfxError, PlanMismatchError
from dispfx.huggingface.registering import register
from dispfx.source.location import Location
from dispfx.source.quiet import quiet
from dispfx.source.transformers_classes import require_known_class


def load_model(
    folder: Path, *, device: torch.device | str = "cpu", trust_remote_code: bool = False, **options: Any
) -> nn.Module:
    """Return the decoder of `folder`, of its own class, in eval mode and in the stored dtype.

    Raises:
        DataError: if transformers does not know the decoder's class or may not run its code, or cannot read
            the folder.
        PlanMismatchError: if its weights and its config do not belong together.
    """
    register()
    require_known_class(folder, trust_remote_code)
    options.setdefault("dtype", "auto")
    try:
        with quiet(Location(str(folder))):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                **options,
            )
    except DispfxError:
        raise
    except Exception as error:
        # transformers may raise anything here; report it as an error of the folder.
        raise DataError(f"transformers cannot load this folder: {error}", where=str(folder)) from error
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        # transformers makes values for it.
        raise PlanMismatchError(
            f"{missing[0]} is not stored ({len(missing)} tensors are missing)",
            where=str(folder),
            hint="config.json and the weights must come from one compilation",
        )
    return model.to(device).eval()
