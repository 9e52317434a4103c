"""A pruned folder as a weight format of vLLM, found by the `quantization_config` of its config.

vLLM builds the decoder by a class of its own, or by its Transformers backend, at the dense sizes.  It asks
this format for the method of every layer, and `PrunedLinearMethod` gives linear layers their pruned sizes.
Products of weights of 8 or 4 bits are those of vLLM's format compressed-tensors.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config  # type: ignore[import-not-found]
from vllm.model_executor.layers.fused_moe import RoutedExperts  # type: ignore[import-not-found]
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod  # type: ignore[import-not-found]
from vllm.model_executor.layers.quantization import register_quantization_config  # type: ignore[import-not-found]
from vllm.model_executor.layers.quantization.base_config import (  # type: ignore[import-not-found]
    QuantizationConfig,
)
from vllm.model_executor.models.utils import WeightsMapper  # type: ignore[import-not-found]

from dispfx.errors import OutputError
from dispfx.huggingface.entries import LOCK, METHOD
from dispfx.serving.fused_layers import FusedLayer, ServedLayout, unserved
from dispfx.serving.linear_method import SHAPED, PrunedLinearMethod
from dispfx.serving.rounded_weights import RoundedWeights
from dispfx.serving.stored_indices import StoredIndices

_HEADS = re.compile(r"heads (\d+) of (\d+)")


class PrunedFolder(QuantizationConfig):
    """The dispfx section of a folder's config.

    Args:
        section: as config.json holds it.

    Raises:
        OutputError, PlanMismatchError: as `ServedLayout.of_section`.
    """

    def __init__(self, section: Mapping[str, Any]):
        super().__init__()
        _require_all_heads(section)
        self._served = ServedLayout.of_section(section)
        self._rounded = RoundedWeights.of_section(section)
        self._products: Any = None if self._rounded is None else _rounded_products(self._rounded)
        self._indices = StoredIndices(self._served.layout, self._rounded)
        # Paths of the folder, by the names that the engine has for them.
        rounded = () if self._rounded is None else self._rounded.layers
        self._paths = {path: path for path in self._served.paths.union(rounded)}
        self._plan = [str(site).partition(": ")[0] for site in section["sites"]]

    @classmethod
    def get_name(cls) -> str:
        """Return the name by which config.json asks for this format."""
        return METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Return the dtypes in which vLLM may compute."""
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the oldest GPU generation: any."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return further files with settings: none."""
        return []

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> None:
        """Leave the choice of a format to vLLM, which asks here for every folder.

        Raises:
            OutputError: if a pruned folder is to be quantised.
        """
        if hf_quant_cfg.get("quant_method") == METHOD and user_quant not in (None, METHOD):
            raise OutputError(
                f"dispfx does not support --quantization {user_quant} in vLLM",
                hint="serve the pruned folder without this option",
            )

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "PrunedFolder":
        """Read the section of config.json."""
        return cls(config)

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Let the Transformers backend build the dense decoder from this config, without memory."""
        if hf_config is not None:
            setattr(hf_config, LOCK, None)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Follow the engine where it has other names for modules than the folder."""
        renamed = {}
        for name, path in self._paths.items():
            weight = hf_to_vllm_mapper.map_name(f"{name}.weight")
            renamed[name if weight is None else weight.removesuffix(".weight")] = path
        self._paths = renamed

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Return the method of a layer, or None where vLLM's own is right.

        Raises:
            OutputError: if vLLM cannot run the layer as it was pruned.
        """
        if isinstance(layer, RoutedExperts):
            self._require_experts(self._paths.get(prefix, prefix))
        if not isinstance(layer, LinearBase):
            return None
        self._require_supported()
        parent, dot, leaf = prefix.rpartition(".")
        names = [f"{parent}{dot}{name}" for name in self.packed_modules_mapping.get(leaf, [leaf])]
        paths = [self._paths.get(name, name) for name in names]
        served = self._served.fused(paths)
        if self._rounded is not None and self._rounded.fused(paths):
            return self._rounded_method(layer, prefix, served or FusedLayer.as_dense(paths))
        return UnquantizedLinearMethod() if served is None else PrunedLinearMethod(served, self._indices)

    def get_checkpoint_weight_mapper(self) -> Any:
        """Return the names under which vLLM loads the stored tensors.

        vLLM asks when all layers exist and before it loads weights.

        Raises:
            OutputError: if a pruned module has no layer.
        """
        self._served.require_all_served()
        if self._rounded is not None:
            self._rounded.require_all_served()
        # A folder that transformers has saved again has no index, and vLLM reads the plan as weights.
        plan = re.compile(f"^(?:{'|'.join(map(re.escape, self._plan))})$")
        renamed = _Renamed(self._served.renamed(), self._indices.note)
        return WeightsMapper(orig_to_new_renaming=[renamed], orig_to_new_regex={plan: None})

    def _rounded_method(self, layer: nn.Module, prefix: str, served: FusedLayer) -> Any:
        """Return the method of a rounded layer, pruned or not; both name the module in errors."""
        assert self._rounded is not None
        try:
            product = self._products.get_quant_method(layer, prefix)
        except (NotImplementedError, RuntimeError, ValueError) as error:
            raise unserved(served.path, f"{self._rounded.scheme} weights do not run here: {error}") from error
        if type(layer) not in SHAPED:
            self._served.require_untouched(served.path, f"a {type(layer).__name__}")
            return product
        return PrunedLinearMethod(served, self._indices, product, self._rounded)

    def _require_experts(self, path: str) -> None:
        """Refuse a mixture that is pruned, or that vLLM's class would read under other names."""
        self._served.require_untouched(path, "a mixture of experts")
        if not get_current_vllm_config().model_config.using_transformers_backend():
            raise unserved(
                path,
                "it stores all experts in one tensor, and its class in vLLM reads them one by one",
                hint="serve with --model-impl transformers, which takes the modules of the decoder itself",
            )

    def _require_supported(self) -> None:
        """Refuse options of the engine under which a pruned layer would compute something else."""
        engine = get_current_vllm_config()
        asked = {
            "adapters": engine.lora_config is not None,
            "pipeline parallelism": engine.parallel_config.pipeline_parallel_size > 1,
            "quantisation while loading": self.online_quantization_config is not None,
            "latent attention (MLA)": engine.model_config.use_mla,
        }
        for option, present in asked.items():
            if present:
                raise OutputError(
                    f"dispfx does not support {option} in vLLM",
                    where=str(engine.model_config.model),
                    hint="docs/serving.md lists what is served",
                )


def _rounded_products(rounded: RoundedWeights) -> Any:
    # Here, because other folders need neither this part of vLLM nor the library that it imports.
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (  # type: ignore[import-not-found]
        CompressedTensorsConfig,
    )

    return CompressedTensorsConfig.from_config(rounded.format())


def _require_all_heads(section: Mapping[str, Any]) -> None:
    """Refuse a plan that cuts heads: vLLM gives every layer the config's number of them.

    Raises:
        OutputError: naming the first attention.
    """
    for site in section["sites"]:
        name, _, kept = str(site).partition(": ")
        found = _HEADS.fullmatch(kept)
        if found is not None and found[1] != found[2]:
            raise unserved(
                name.rpartition(".")[0],
                f"it keeps {found[1]} of {found[2]} key/value heads, and vLLM expects all of them",
                hint="compile without --sites heads for vLLM; transformers and ONNX Runtime run this folder",
            )


class _Renamed:
    """Renames whole names of tensors, as the renamings of transformers do.

    Args:
        names: new ones by the old ones.
        note: gets every old name.
    """

    def __init__(self, names: Mapping[str, str], note: Callable[[str], None]):
        self._names = names
        self._note = note

    def rename_source_key(self, name: str) -> tuple[str, None]:
        """Return the new name, and no pattern."""
        self._note(name)
        return self._names.get(name, name), None


def install() -> None:
    """Register the format with vLLM."""
    register_quantization_config(METHOD)(PrunedFolder)
