"""The location of a checkpoint for transformers: a folder, a GGUF file, or the hub."""

from dataclasses import dataclass
from typing import Any

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

from dispfx.errors import SourceError
from dispfx.words.model_origin import FORMS
from dispfx.words.python_code import suggestion_for

_HUB_SECONDS = 10.0


@dataclass(frozen=True)
class Location:
    """The location of a checkpoint.

    Args:
        path: a folder, or a hub id.
        revision: of the hub id; None for a folder.
        gguf_file: name of the GGUF file in the folder.
        hub: whether `path` is a hub id.
        offline: whether to use only the local cache of the hub.
    """

    path: str
    revision: str | None = None
    gguf_file: str | None = None
    hub: bool = False
    offline: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments for from_pretrained."""
        given = {"revision": self.revision, "gguf_file": self.gguf_file}
        options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return {**options, "local_files_only": self.offline or not self.hub}


def reach_hub(hub_id: str, revision: str | None, given: str = "MODEL") -> Location:
    """Return the location of `hub_id`: the hub, or the local cache.

    This is checked first, because downloads wait half a minute for an unreachable hub.

    Args:
        given: the argument that named it, MODEL or an option.

    Raises:
        SourceError: if the hub does not have it, or cannot be reached and it was never downloaded.
    """
    # The forms of MODEL say nothing about an option that names something else.
    forms, suggested = (f"; {FORMS}", suggestion_for(hub_id)) if given == "MODEL" else ("", None)
    try:
        HfApi().model_info(hub_id, revision=revision, timeout=_HUB_SECONDS)
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise SourceError(
            f"{given} is not a local folder, and the hub has no model of that name that you may read",
            where=hub_id,
            hint=suggested or f"check the spelling{forms}",
        ) from error
    except RevisionNotFoundError as error:
        raise SourceError(f"the model has no revision {revision}", where=hub_id) from error
    except Exception as error:
        # Proxies, DNS, time-outs, HF_HUB_OFFLINE: each client version has its own exceptions for them.
        cached = try_to_load_from_cache(hub_id, "config.json", revision=revision)
        if not isinstance(cached, str):
            raise SourceError(
                f"{given} is not a local folder, and the hub cannot be reached ({type(error).__name__})",
                where=hub_id,
                hint=suggested or f"check the path or the network, or download it first{forms}",
            ) from error
        return Location(hub_id, revision, hub=True, offline=True)
    return Location(hub_id, revision, hub=True)
