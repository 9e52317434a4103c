"""How `from_pretrained` reads a pruned folder: the extension point of transformers for weight formats.

    config.json           from_pretrained does                      here
    quantization_config   makes a DispfxConfig and its quantizer
    transformers_weights  would raise it as an error                `_unlock` takes it away
                          builds the dense decoder without memory   its modules get the pruned shapes
                          reads the weights into it
                          marks the model as quantised              the indices are checked, the mark goes

A loaded model is an ordinary one: it can be cast, trained, saved and quantised.  Importing this module
registers it, which may happen while transformers is being imported: what of transformers is not loaded by
then is imported where it is used.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.quantizers.auto import (
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from dispfx.errors import OutputError
from dispfx.huggingface.building import headless_prefix, own_path, shape_modules
from dispfx.huggingface.entries import (
    LOCK,
    METHOD,
    REFUSAL,
    SECTION,
    checked_section,
    without_rounded_weights,
)
from dispfx.huggingface.index_values import remember_index
from dispfx.huggingface.layout import Layout
from dispfx.huggingface.modules import held_index, index_buffers
from dispfx.huggingface.rounded_modules import (
    fill_weight,
    make_room,
    require_form_of_files,
    require_held,
    rounded_modules,
)


class DispfxConfig(QuantizationConfigMixin):
    """The dispfx section of a config, and the bytes of the plan once a decoder was loaded with it."""

    def __init__(self, **section: Any):
        self.section = section
        self.plan: bytes | None = None
        self.quant_method = METHOD  # type: ignore[assignment]

    def to_dict(self) -> dict[str, Any]:
        """Return the section as config.json holds it."""
        return copy.deepcopy(self.section)


class DispfxQuantizer(HfQuantizer):
    """Gives a decoder the modules of its pruned form while transformers loads it."""

    requires_calibration = True

    def __init__(self, quantization_config: DispfxConfig, **kwargs: Any):
        super().__init__(quantization_config, **kwargs)
        self.layout = _layout_of(quantization_config.section)
        self._config = quantization_config
        self._rounded: list[nn.Module] = []

    def update_attn_implementation(self, config: Any) -> Any:
        """Called with the config before the weights are looked for, since transformers 5.20."""
        return _unlock(config)

    def update_tp_plan(self, config: Any) -> Any:
        """Called with the config before the weights are looked for, by transformers 5.17."""
        return _unlock(config)

    def is_serializable(self) -> bool:
        """Whether a loaded model can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether a loaded model can be trained."""
        return True

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        from dispfx.huggingface.guards import plan_bytes

        _require_own_class(model)
        # Now, because the folder may be moved before the decoder is saved, or its path be relative.
        files = kwargs.get("checkpoint_files") or [Path(str(model.config.name_or_path), "config.json")]
        self._config.plan = plan_bytes(Path(files[0]).parent, self._config.section)
        for path, dtype in self.layout.dtypes.items():
            _expect_dtype(model, path, getattr(torch, dtype), kwargs.get("dtype"))
        require_form_of_files(kwargs.get("checkpoint_files"), self._config.section)
        shape_modules(model, self.layout)
        self._rounded = rounded_modules(model, self._config.section)
        for module in self._rounded:
            make_room(module, self._config.section)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        require_held(model, self._rounded, self._config.section)
        for module in self._rounded:
            fill_weight(module, self._config.section)
        self._config.section = without_rounded_weights(self._config.section)
        found = index_buffers(model)
        prefix = headless_prefix(model)
        named = {
            f"{path.removeprefix(prefix)}.{name}": f"{path}.{name}"
            for path, module in self.layout.modules.items()
            for name in module.indices
        }
        indices = {named[own]: _held(model, own) for own in found if own in named}
        self.layout.check_indices(indices)
        for own in found:
            path, _, name = own.rpartition(".")
            remember_index(model.get_submodule(path), name, _held(model, own))
        _leave_quantised_mode(model)
        return model

    def update_parallel_plan(self, model: Any, plan: dict[str, str]) -> None:
        """Called twice since transformers 5.20; there are no extra tensors to plan for."""


def install() -> None:
    """Register with transformers, once."""
    if METHOD in AUTO_QUANTIZER_MAPPING:
        return
    register_quantization_config(METHOD)(DispfxConfig)
    register_quantizer(METHOD)(DispfxQuantizer)


def _layout_of(section: dict[str, Any]) -> Layout:
    checked_section(section, None)
    if section.get("layout") is None:
        raise OutputError(
            f"this decoder cannot be built from transformers modules: {section.get('reason')}",
            hint="open the folder with dispfx.load(folder)",
        )
    return Layout.from_json(section["layout"])


def _unlock(config: Any) -> Any:
    setattr(config, LOCK, None)
    return config


def _require_own_class(model: Any) -> None:
    """Refuse a class of transformers where the folder brings its own, which may compute something else."""
    is_theirs = type(model).__module__.partition(".")[0] == "transformers"
    if is_theirs and "AutoModelForCausalLM" in (getattr(model.config, "auto_map", None) or {}):
        raise OutputError(
            f"the decoder's class is code that comes with the folder, not {type(model).__name__}",
            hint="read that code, then allow it with trust_remote_code=True",
        )


def _expect_dtype(model: Any, path: str, dtype: torch.dtype, asked: torch.dtype | None) -> None:
    """Let a tensor that is stored in another dtype than the rest be read as it is."""
    owner, _, name = own_path(model, path).rpartition(".")
    try:
        module = model.get_submodule(owner)
    except AttributeError:
        return
    if module._buffers.get(name) is not None:
        module._buffers[name] = module._buffers[name].to(dtype)
    elif module._parameters.get(name) is not None and asked == getattr(model.config, "dtype", asked):
        old = module._parameters[name]
        module._parameters[name] = nn.Parameter(old.to(dtype), requires_grad=old.requires_grad)


def _held(model: nn.Module, path: str) -> Tensor:
    owner, _, name = path.rpartition(".")
    return held_index(model.get_submodule(owner), name)


def _leave_quantised_mode(model: Any) -> None:
    """Lock configs again.  Nothing is quantised; transformers forbids casts and training where it is."""
    from transformers.modeling_utils import PreTrainedModel

    for name in ("hf_quantizer", "quantization_method"):
        if hasattr(model, name):
            delattr(model, name)
    model.is_quantized = False
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(module, PreTrainedModel):
            if hasattr(config, "_is_quantized"):
                delattr(config, "_is_quantized")
            if getattr(config, SECTION, None) is not None:
                setattr(config, LOCK, REFUSAL)


install()
