"""One linear layer of vLLM on fewer features.

    x → x[…, read] → product → sum over ranks → pad with a zero → [write]

1. The product is vLLM's own for plain weights, or for weights of 8 or 4 bits, in whatever way the device
   runs it.
2. vLLM's loaders and the layers themselves read sizes from the layer, so the layer gets its true sizes.
3. A layer that sums over ranks sums the kept features and then puts them among zeros, so that less is sent.
4. An index is a parameter, because vLLM loads those; it starts at -1 and is checked after loading.
5. The class is not derived from vLLM's plain method: quantisation while loading would replace it.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.distributed import tensor_model_parallel_all_reduce  # type: ignore[import-not-found]
from vllm.model_executor.layers.linear import (  # type: ignore[import-not-found]
    ColumnParallelLinear,
    LinearMethodBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.utils import set_weight_attrs  # type: ignore[import-not-found]

from dispfx.errors import PlanMismatchError
from dispfx.huggingface.layout import ONE_COMPILATION, READ, WRITE
from dispfx.serving.fused_layers import FusedLayer, Gather, shared, unserved
from dispfx.serving.kernel_widths import require_kernel
from dispfx.serving.rounded_weights import RoundedWeights
from dispfx.serving.stored_indices import StoredIndices

_COLUMNS = (ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear)
# Kinds of layers whose sizes are known here.
SHAPED = (RowParallelLinear, *_COLUMNS, ReplicatedLinear)


@register_weight_loader_v2_supported_method
class PrunedLinearMethod(LinearMethodBase):
    """The product of a linear layer of vLLM, with its gathers.

    Args:
        served: what the layer reads, computes and writes.
        indices: of the whole decoder, for those that several layers use.
        product: vLLM's method for the weight, if it is rounded.
        rounded: the rounded layers of the decoder, if this is one of them.
    """

    def __init__(
        self,
        served: FusedLayer,
        indices: StoredIndices,
        product: Any = None,
        rounded: RoundedWeights | None = None,
    ):
        self.served = served
        self.plain = UnquantizedLinearMethod() if product is None else product
        self._rounded = rounded
        self._indices = indices
        self._sums = False

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Make the weight, of shape (outputs, inputs) of this rank, and room for the indices.

        The arguments are vLLM's; sizes are the dense decoder's.

        Raises:
            OutputError: if the layer is of another kind, its features cannot be shared by the ranks, or
                vLLM has no kernel for its rounded weight.
        """
        if type(layer) is RowParallelLinear:
            inputs, outputs = self._shape_rows(layer, input_size, output_size)
        elif type(layer) in _COLUMNS:
            inputs, outputs = self._shape_columns(layer, input_size, output_partition_sizes)
        elif type(layer) is ReplicatedLinear:
            inputs, outputs = self._shape_replicated(layer, input_size, output_partition_sizes)
        else:
            raise unserved(self.served.path, f"vLLM runs it in a {type(layer).__name__}")
        attributes = {
            **extra_weight_attrs,
            "weight_loader": self._checked(layer, extra_weight_attrs["weight_loader"]),
        }
        if self._rounded is not None:
            sizes = inputs, outputs
            require_kernel(layer, self.plain, self.served, self._rounded, sizes, params_dtype)
        self.plain.create_weights(
            layer, inputs, outputs, layer.input_size, layer.output_size, params_dtype, **attributes
        )
        if self.served.read is not None:
            self._add_index(layer, READ, self.served.read, self.served.read.kept)
        if self.served.write is not None:
            self._add_index(layer, WRITE, self.served.write, self.served.write.features)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check what was loaded, then let vLLM arrange the weight for the device.

        Raises:
            PlanMismatchError: if an index or a weight was not loaded, or an index is not the one of the
                folder's config.
        """
        for name, gather in ((READ, self.served.read), (WRITE, self.served.write)):
            if gather is not None:
                self._indices.check(gather, getattr(layer, name))
        self._indices.require_weights()
        self.plain.process_weights_after_loading(layer)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product of x, (…, features), as the rest of the decoder takes it."""
        if self.served.read is not None:
            x = (F.pad(x, (0, 1)) if self.served.read.padded else x).index_select(-1, layer.dispfx_read)
        y = self.plain.apply(layer, x, bias)
        if self._sums:
            y = tensor_model_parallel_all_reduce(y)
        if self.served.write is not None:
            y = F.pad(y, (0, 1)).index_select(-1, layer.dispfx_write)
        return y

    def _shape_rows(self, layer: Any, input_size: int, output_size: int) -> tuple[int, list[int]]:
        """Give a layer whose input is shared by the ranks its sizes; return those of this rank."""
        served = self.served
        if layer.tp_size > 1 and served.read is not None:
            raise unserved(served.path, "it gathers an input that tensor parallelism shares by the ranks")
        if served.write is not None and layer.skip_bias_add and layer.has_bias:
            raise unserved(served.path, "vLLM adds its bias after it, to features that are pruned")
        outputs = served.output_sizes([output_size])
        layer.input_size = input_size if served.inputs is None else served.inputs
        layer.input_size_per_partition = shared(layer.input_size, layer.tp_size, served.path)
        layer.output_size = layer.output_size_per_partition = outputs[0]
        layer.output_partition_sizes = outputs
        if served.write is not None and layer.reduce_results and layer.tp_size > 1:
            # Rule 3.
            layer.reduce_results, self._sums = False, True
        return layer.input_size_per_partition, outputs

    def _shape_columns(self, layer: Any, input_size: int, partitions: list[int]) -> tuple[int, list[int]]:
        """Give a layer whose output is shared by the ranks its sizes; return those of this rank."""
        served = self.served
        if type(layer) is QKVParallelLinear:
            if any(kept is not None for kept in served.outputs):
                raise unserved(served.path, "its heads are pruned")
        else:
            dense = list(getattr(layer, "output_sizes", [layer.output_size]))
            sizes = served.output_sizes(dense)
            partitions = [shared(size, layer.tp_size, served.path) for size in sizes]
            if type(layer) is MergedColumnParallelLinear:
                layer.output_sizes = sizes
            layer.output_size = sum(sizes)
        if served.write is not None and (layer.tp_size > 1 or len(partitions) > 1):
            raise unserved(served.path, "it puts features among zeros that ranks or fused modules share")
        layer.input_size = input_size if served.inputs is None else served.inputs
        layer.input_size_per_partition = layer.input_size
        layer.output_partition_sizes = partitions
        layer.output_size_per_partition = sum(partitions)
        return layer.input_size, partitions

    def _shape_replicated(self, layer: Any, input_size: int, dense: list[int]) -> tuple[int, list[int]]:
        """Give a layer that every rank has its sizes; return them."""
        layer.input_size = input_size if self.served.inputs is None else self.served.inputs
        layer.output_partition_sizes = self.served.output_sizes(dense)
        layer.output_size = sum(layer.output_partition_sizes)
        return layer.input_size, layer.output_partition_sizes

    def _add_index(self, layer: nn.Module, name: str, gather: Gather, length: int) -> None:
        values = self._indices.room(gather, length)
        if not gather.loaded:
            # The same memory as the parameter of the layer that loads it.
            layer.register_buffer(name, values, persistent=False)
            return
        index = nn.Parameter(values, requires_grad=False)
        set_weight_attrs(index, {"weight_loader": self._indices.loader(gather)})
        layer.register_parameter(name, index)

    def _checked(self, layer: nn.Module, load: Callable[..., None]) -> Callable[..., None]:
        """Return a weight loader that names the module if a stored weight has another shape."""

        def checked(parameter: Any, stored: Tensor, *shard: Any) -> None:
            try:
                load(parameter, stored, *shard)
            except (AssertionError, RuntimeError) as error:
                names = [name for name, one in layer.named_parameters(recurse=False) if one is parameter]
                raise PlanMismatchError(
                    f"the stored weight has the shape {tuple(stored.shape)}, which is not the layout's",
                    where=f"{self._module(*shard)}.{(names or ['weight'])[0]}",
                    hint=ONE_COMPILATION,
                ) from error

        return checked

    def _module(self, shard: Any = None) -> str:
        """Return the path of the module that vLLM calls a shard."""
        number = {"q": 0, "k": 1, "v": 2}.get(shard, shard)
        if isinstance(number, int) and number < len(self.served.paths):
            return self.served.paths[number]
        return self.served.path
