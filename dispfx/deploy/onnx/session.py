"""ONNX models that run: with their inputs and outputs bound to torch tensors, so that nothing is copied.

`OnnxDecoder` computes a whole sequence; `CachedSession` takes a cache and gives one back.

Shape legend: B batch, T new tokens, P cached tokens, V vocabulary.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import Tensor

from dispfx.deploy.onnx.files import check_external_data
from dispfx.errors import DataError, DispfxError
from dispfx.ir.cached_inputs import CACHED_INPUTS, CachedDecoder, CachedShape, CacheTensor

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
# Numbers of onnx.TensorProto; ONNX Runtime takes them for types that numpy lacks.
_ELEMENT_TYPES = {torch.float32: 1, torch.int64: 7, torch.bool: 9, torch.float16: 10, torch.bfloat16: 16}
_DTYPES = {
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "tensor(bfloat16)": torch.bfloat16,
}


@dataclass(frozen=True)
class SessionOptions:
    """How ONNX Runtime runs a model.

    Args:
        device: cpu or cuda.
        cuda_graph: record the kernels of a run once and replay them; every shape must stay the same.
        profile: prefix of a file that says what ran where, or None.
        stream: of CUDA, to run on; ONNX Runtime's own by default.
        threads: of the CPU provider; as torch has by default.
    """

    device: str = "cpu"
    cuda_graph: bool = False
    profile: str | None = None
    stream: int | None = None
    threads: int | None = None

    def open(self, path: Path) -> onnxruntime.InferenceSession:
        """Return a session on the model.

        Raises:
            DataError: if the model is missing or damaged, or keeps weights outside its folder.
            DispfxError: if ONNX Runtime has no such device here.
        """
        check_external_data(path)
        if _PROVIDERS[self.device] not in onnxruntime.get_available_providers():
            raise DispfxError(f"ONNX Runtime has no {_PROVIDERS[self.device]} here")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = self.threads or torch.get_num_threads()
        if self.profile is not None:
            options.enable_profiling = True
            options.profile_file_prefix = self.profile
        try:
            session = onnxruntime.InferenceSession(str(path), options, providers=self._providers())
        except Exception as error:
            # ONNX Runtime has a dozen error classes without a common base; the file is the cause of all.
            raise DataError(f"ONNX Runtime refuses the model: {error}", where=str(path)) from error
        if session.get_providers()[0] != _PROVIDERS[self.device]:
            raise DispfxError(
                f"ONNX Runtime could not start its {_PROVIDERS[self.device]}",
                hint="its CUDA libraries must be found: import torch first",
            )
        return session

    def _providers(self) -> list[Any]:
        if self.device == "cpu":
            return ["CPUExecutionProvider"]
        options = {"enable_cuda_graph": "1" if self.cuda_graph else "0"}
        if self.stream is not None:
            options["user_compute_stream"] = str(self.stream)
        return [("CUDAExecutionProvider", options), "CPUExecutionProvider"]


class OnnxDecoder:
    """A model without a cache, on the CPU: token ids (B, T) in, logits (B, T, V) out, both torch tensors.

    Raises:
        DataError: if the file is missing or damaged, or keeps weights outside its folder.
    """

    def __init__(self, path: Path):
        self._session = SessionOptions().open(path)

    def __call__(self, ids: Tensor) -> Tensor:
        (logits,) = self._session.run(["logits"], {"input_ids": ids.cpu().numpy()})
        return torch.from_numpy(logits)


class CachedSession:
    """A model with a cache: the inputs and outputs of `dispfx.ir.cached_inputs`, as torch tensors.

    Args:
        path: of the model.
        options: how to run it.

    Attributes:
        caches: what the model keeps.
        vocabulary_size: width of the logits.
        session: of ONNX Runtime.

    Raises:
        DataError: if the file is missing, damaged, or no decoder with a cache.
    """

    def __init__(self, path: Path, options: SessionOptions = SessionOptions()):
        self.session = options.open(path)
        self.device = torch.device(options.device)
        self.caches = tuple(_caches(self.session))
        if not self.caches:
            raise DataError("a model with a cache of keys and values was expected", where=str(path))
        logits = self.session.get_outputs()[0]
        self.vocabulary_size, self.logits_dtype = int(logits.shape[-1]), _DTYPES[logits.type]
        self.inputs = tuple(value.name for value in self.session.get_inputs())

    def outputs(self, shape: CachedShape) -> dict[str, Tensor]:
        """Return empty tensors for the outputs at a shape, by name."""
        batch, tokens, past = shape
        logits = torch.empty(batch, tokens, self.vocabulary_size, dtype=self.logits_dtype, device=self.device)
        present = {
            cache.present: torch.empty(
                batch, cache.heads, past + tokens, cache.size, dtype=cache.dtype, device=self.device
            )
            for cache in self.caches
        }
        return {"logits": logits, **present}

    def bind(self, inputs: Sequence[Tensor], outputs: Mapping[str, Tensor]) -> "BoundRun":
        """Return a run on these very tensors.

        Args:
            inputs: token ids, mask, positions and caches, in the order of `inputs`, contiguous.
            outputs: as `outputs` gives.
        """
        binding = self.session.io_binding()
        names = (*CACHED_INPUTS, *(cache.past for cache in self.caches))
        given = {name: tensor for name, tensor in zip(names, inputs, strict=True) if name in self.inputs}
        for name, tensor in given.items():
            binding.bind_input(name, *_place(tensor))
        for name, tensor in outputs.items():
            binding.bind_output(name, *_place(tensor))
        return BoundRun(self.session, binding, (list(given.values()), dict(outputs)))

    def __call__(self, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the outputs for given inputs, by name."""
        batch, tokens = inputs[0].shape
        shape = CachedShape(batch, tokens, inputs[1].shape[1] - tokens)
        outputs = self.outputs(shape)
        self.bind(inputs, outputs).run()
        return outputs

    def decoder(self) -> CachedDecoder:
        """Return the model as one that keeps its cache between calls, on the session's device."""

        def step(*inputs: Tensor) -> Iterable[Tensor]:
            return self([one.to(self.device).contiguous() for one in inputs]).values()

        return CachedDecoder(step, self.caches)


@dataclass(frozen=True, eq=False)
class BoundRun:
    """A run whose inputs and outputs have their places; they are held, so that these stay theirs."""

    session: onnxruntime.InferenceSession
    binding: Any
    held: Any = field(repr=False)

    def run(self) -> None:
        """Compute the outputs; they are there when this returns."""
        self.session.run_with_iobinding(self.binding)


def _caches(session: onnxruntime.InferenceSession) -> list[CacheTensor]:
    prefix = "past_key_values."
    return [
        CacheTensor(value.name.removeprefix(prefix), value.shape[1], value.shape[3], _DTYPES[value.type])
        for value in session.get_inputs()
        if value.name.startswith(prefix)
    ]


def _place(tensor: Tensor) -> tuple[str, int, int, list[int], int]:
    """Return where a tensor lies, as ONNX Runtime wants to know it."""
    if not tensor.is_contiguous():
        raise DispfxError("a tensor must be contiguous to be bound")
    # Nothing may lie at address 0, not even nothing.
    pointer = tensor.data_ptr() or torch.empty(1, device=tensor.device).data_ptr()
    device = tensor.device
    return device.type, device.index or 0, _ELEMENT_TYPES[tensor.dtype], list(tensor.shape), pointer
