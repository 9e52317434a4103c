"""DIR/int8, DIR/int4 and DIR/fp8: the checkpoint of a folder with weights of 8 or 4 bits.

    DIR, calibration data → rounded weights → DIR/int4 → read back → compared → measured

1. transformers and vLLM open the folder like DIR.  It holds the plan, the config and the tokenizer of DIR.
   Rounded layers have other tensors (`dispfx.quantization.stored_weights`); all other tensors are equal.
2. Read back, every rounded layer must have exactly the numbers that were chosen.
3. A rounded weight must be near its original.  `verify DIR` compares the two folders again.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from dispfx.capturing.module_capture import module_logits
from dispfx.deploy import weights
from dispfx.deploy.digests import digests, stored_size
from dispfx.deploy.folder import new_folder
from dispfx.deploy.section import CONFIG_FILE, read_config, read_layout, write_config
from dispfx.errors import OutputError
from dispfx.huggingface.entries import SECTION, with_rounded_weights
from dispfx.huggingface.model_loading import load_model
from dispfx.quality.agreement import compare_on_text
from dispfx.quantization.rounded_layers import layers_to_round, rounded_layers
from dispfx.quantization.stored_weights import (
    SCHEMES,
    WEIGHT,
    fills_groups,
    stored_tensors,
    weights_section,
)
from dispfx.report import Quantized, QuantizedQuality
from dispfx.run.calibration import Calibration, calibration_of
from dispfx.run.folders import Opened
from dispfx.run.onnx_folder import has_onnx
from dispfx.run.quantized_record import keep_figures, quality_of, record, short_context
from dispfx.run.recovered_folder import copy_files, write_stored
from dispfx.settings import TextSettings
from dispfx.verification.equivalence import Verification, require
from dispfx.words.option_names import option
from dispfx.words.preconditions import refuse_rounded

_TINY = 1e-30


@dataclass(frozen=True, eq=False)
class _Rounding:
    """The checkpoint of a folder, and which of its layers are rounded.

    Args:
        opened: the folder.
        scheme: of the weights.
        layers: those that are rounded, by path.
        unfit: paths of those that are not, because their inputs do not fill groups.
    """

    opened: Opened
    scheme: str
    layers: dict[str, nn.Module]
    unfit: tuple[str, ...] = ()

    @staticmethod
    def of(opened: Opened, scheme: str) -> "_Rounding":
        """Find the layers.

        Raises:
            OutputError: if the folder has no modules or holds rounded weights, or no layer can be rounded.
        """
        if opened.plan is None or read_layout(opened.path) is None:
            raise OutputError(
                "a quantized checkpoint needs modules of transformers, and this folder holds a graph",
                where=str(opened.path),
                hint=f"add {option('onnx', True)} for an ONNX model with quantized weights"
                if has_onnx(opened.path)
                else f"dispfx compile and apply write one with {option('export', 'onnx')}; "
                f"{option('onnx', True)} then quantizes its ONNX model",
            )
        refuse_rounded(opened.path)
        stored = weights.read_headers(opened.path)
        found: dict[str, nn.Module] = {
            path: layer
            for path, layer in layers_to_round(opened.decoder).items()
            if type(layer) is nn.Linear and f"{path}.{WEIGHT}" in stored
        }
        if not found:
            raise OutputError("no linear layer has a weight that can be rounded", where=str(opened.path))
        fitting = {path: layer for path, layer in found.items() if fills_groups(scheme, layer)}
        if not fitting:
            group = SCHEMES[scheme].grid.group
            raise OutputError(
                f"{scheme} keeps groups of {group} inputs, and no layer reads a multiple of {group}",
                where=str(opened.path),
                hint=f"dispfx compile {option('align', group)} makes such layers; or choose int8",
            )
        return _Rounding(opened, scheme, fitting, tuple(found.keys() - fitting.keys()))

    @property
    def model(self) -> nn.Module:
        """The folder's decoder as modules."""
        return self.opened.decoder

    @property
    def left(self) -> list[str]:
        """Paths of the parameters of two or more dimensions that are not rounded."""
        rounded = {f"{path}.{WEIGHT}" for path in self.layers}
        return [path for path, one in self.model.named_parameters() if one.dim() > 1 and path not in rounded]

    def write(self, folder: Path, chosen: Calibration) -> dict[str, Tensor]:
        """Write the quantized folder; return the numbers of every rounded layer, by path."""
        stored = weights.read_tensors(self.opened.path)
        texts = partial(chosen.on, self.opened.device) if chosen.windows else None
        numbers = {}
        for path, found in rounded_layers(self.model, self.layers, SCHEMES[self.scheme].grid_of, texts):
            dtype = stored.pop(f"{path}.{WEIGHT}").dtype
            numbers[path] = found.numbers.to(dtype).cpu()
            tensors = stored_tensors(self.scheme, found, dtype)
            stored |= {f"{path}.{name}": tensor.cpu() for name, tensor in tensors.items()}
        copy_files(self.opened.path, folder)
        self._write_config(folder)
        write_stored(folder, self.opened.path, stored)
        return numbers

    def _write_config(self, folder: Path) -> None:
        linear = {path for path, module in self.model.named_modules() if isinstance(module, nn.Linear)}
        section = weights_section(self.scheme, linear - self.layers.keys())
        entries = read_config(self.opened.path)
        entries[SECTION] = with_rounded_weights(entries[SECTION], self.scheme, sorted(self.layers), section)
        write_config(folder, entries)

    def compared(self, again: nn.Module) -> list[Verification]:
        """Compare a decoder that was read back with this one (rules 1 and 3)."""
        theirs, changes, other = dict(again.state_dict()), [], 0.0
        for path, tensor in self.model.state_dict().items():
            found = theirs.pop(path, None)
            if found is None or found.shape != tensor.shape:
                other = torch.inf
            elif path.removesuffix(f".{WEIGHT}") in self.layers and path.endswith(f".{WEIGHT}"):
                change, size = (found.to(tensor) - tensor).float().norm(), tensor.float().norm()
                changes.append(change / size.clamp(min=_TINY))
            elif not torch.equal(found.to(tensor.device), tensor):
                other = torch.inf
        far, near = _largest(changes), SCHEMES[self.scheme].grid.near
        return [
            Verification(f"{self.scheme} stays near checkpoint", (), far, far, near),
            Verification(f"{self.scheme}, all else = checkpoint", (), other, other, 0.0),
        ]

    def quality(self, again: nn.Module, chosen: Calibration, windows: int | None) -> QuantizedQuality | None:
        """Compare both decoders on a text."""
        if chosen.measured is None:
            return None
        device = self.opened.device
        return quality_of(
            compare_on_text(
                partial(module_logits, self.model),
                partial(module_logits, again.to(device)),
                chosen.measured.tokens,
                context=short_context(self.opened),
                windows=windows,
                device=device,
                text=chosen.measured.about,
            )
        )


def write_quantized_checkpoint(opened: Opened, scheme: str, text: TextSettings) -> Quantized:
    """Write DIR/<scheme>, checked and measured, and return what a report says of it.

    Args:
        opened: an output folder with a checkpoint.
        scheme: int8, int4 or fp8.
        text: calibration data, which int4 needs, and the text to measure on.

    Raises:
        OutputError: if the folder has no modules of transformers or holds rounded weights, or no layer can be
            rounded.
        DataError: if a text is missing or cannot be used, or compressed-tensors is not installed.
        VerificationError: if the weights that are read back are not those that were chosen; then no folder is
            written.
    """
    rounding = _Rounding.of(opened, scheme)
    chosen = calibration_of(opened, scheme, text)
    with new_folder(opened.path / scheme) as folder:
        numbers = rounding.write(folder, chosen)
        again = load_model(folder, trust_remote_code=opened.trust_remote_code)
        lines = [_as_chosen(scheme, numbers, again), *rounding.compared(again)]
        require(*lines)
        found = Quantized(
            name=scheme,
            form="checkpoint",
            bytes_before=stored_size(opened.path)[1],
            bytes_after=stored_size(folder)[1],
            quality=rounding.quality(again, chosen, text.eval_windows),
            left=tuple(rounding.left),
            verify=tuple(lines),
            files={f"{scheme}/{name}": digest for name, digest in digests(folder).items()},
            rounded_by=chosen.name,
            unfit=tuple(sorted(rounding.unfit)),
        )
        keep_figures(folder, found)
    return record(opened.path, opened.path / scheme)


def quantized_checkpoint_lines(opened: Opened) -> list[Verification]:
    """Compare every quantized checkpoint in a folder with the folder's own weights.

    Raises:
        DataError: if one is damaged.
    """
    lines = []
    for scheme in quantized_checkpoints(opened.path):
        again = load_model(opened.path / scheme, trust_remote_code=opened.trust_remote_code)
        lines += _Rounding.of(opened, scheme).compared(again)
    return lines


def quantized_checkpoints(folder: Path) -> list[str]:
    """Return the schemes in which a folder holds a quantized checkpoint."""
    return [scheme for scheme in SCHEMES if (folder / scheme / CONFIG_FILE).is_file()]


def _as_chosen(scheme: str, numbers: dict[str, Tensor], again: nn.Module) -> Verification:
    """Require the numbers that were chosen in every layer that was read back (rule 2)."""
    layers = dict(again.named_modules())
    wrong = _largest(
        (layers[path].weight.detach() - chosen).abs().max()  # type: ignore[operator]
        for path, chosen in numbers.items()
    )
    return Verification(f"{scheme} reloaded = chosen", (), wrong, wrong, 0.0)


def _largest(values: Iterable[Tensor]) -> float:
    """Return the largest of some numbers, and NaN if one is no number, which `max` may skip."""
    return float(torch.stack([value.cpu().float() for value in values]).max())
