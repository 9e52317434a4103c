"""The program being compiled: one torch.fx graph, its tensors, and what is known about it.

`Program` is the compiler's only mutable object.  The graph takes token ids first and returns logits
first; where it has a cache, further inputs and outputs follow.  Its tensors are `get_attr` nodes whose
targets are the decoder's own parameter paths.  The facts (`stream`, `branches`, `sites`, …) are frozen
and hold names, so they stay true for a copy.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from dispfx.ir import ops
from dispfx.ir.cache_size import CacheSize
from dispfx.ir.lengths import Lengths, hold_to
from dispfx.ir.outline import Outline
from dispfx.ir.shown_tables import program_html, program_text
from dispfx.ir.sites import Branch, Refusal, ResidualStream, Site
from dispfx.ir.token_tables import tokens_read
from dispfx.words.given import require_given

# Kept indices of a site are the buffer `dispfx_index.<site>` of a lowered decoder.
INDEX_PREFIX = "dispfx_index"
# Statistics of whole weights, computed from the dense decoder.
DENSE_PREFIX = "dispfx_dense"


@dataclass(frozen=True)
class Leaf:
    """One written operand of the residual stream, before it has sites.

    Args:
        branch: name of the branch.
        kind: attention, mlp or mixer.
        top: name of the value that is written.
        user: name of the addition that takes it.
        nodes: names of the nodes between the stream and `top`, `top` included.
        entry: name of the stream value that it reads.
    """

    branch: str
    kind: str
    top: str
    user: str
    nodes: frozenset[str]
    entry: str


@dataclass(repr=False)
class Program:
    """A decoder on its way through the compiler.

    Args:
        graph_module: forward(input_ids (B, T) int64, …) -> logits (B, T, V), or a tuple that starts with
            them.
        model_class: qualified class name of the captured module.
        fingerprint: identifies the decoder's structure and weights.
        level: captured, canonical, gated or lowered; `dispfx.ir.spec` says what each allows.
        inputs: names of the graph's inputs, token ids first; a cached capture has more than these.
        outputs: names of what the graph returns, logits first; a cached capture returns its caches too.
        stream: the residual stream, once found.
        leaves: what writes into the stream, once found.
        branches: the branches with at least one site, once found.
        sites: what can be pruned, in the order of the stream.
        refused: what is left dense, and why.
        closures: by site, the labels of every (value, dimension) that is cut with it.
        identity: the difference to the captured module that the capture measured, by (batch, tokens), or
            (batch, tokens, cached tokens); empty where the module had no values.
        ties: path of every tied parameter -> the path under which its tensor is kept.
        outline: the graph in parts, once found; rewriting the graph makes it stale.
        unused: tensors of the decoder that the graph does not read, by path.
        logits_returned: how many tensors of the logits' shape the decoder returns; one of them is its logits.
        separator: token that ends a document, where the graph keeps the documents of a sequence apart.
        lengths: the sequence lengths for which the graph holds; `hold_to` changes them.
        context: tokens that the decoder reads, where its config names them; its graph may hold for fewer.
        computes_on: device of the graph where the parameters are on another (`dispfx.ir.retype`).
        cache: what each token takes in the KV cache, once sites are found in a graph without a cache.
    """

    graph_module: fx.GraphModule
    model_class: str
    fingerprint: str
    level: str = "captured"
    inputs: tuple[str, ...] = ("input_ids",)
    outputs: tuple[str, ...] = ("logits",)
    stream: ResidualStream | None = None
    leaves: tuple[Leaf, ...] = ()
    branches: tuple[Branch, ...] = ()
    sites: tuple[Site, ...] = ()
    refused: tuple[Refusal, ...] = ()
    closures: Mapping[str, Mapping[tuple[str, int], np.ndarray]] = field(default_factory=dict)
    identity: Mapping[tuple[int, ...], Any] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)
    outline: Outline | None = None
    unused: Mapping[str, Tensor] = field(default_factory=dict)
    logits_returned: int = 1
    separator: int | None = None
    lengths: Lengths = field(default_factory=Lengths)
    context: int | None = None
    computes_on: torch.device | None = None
    cache: CacheSize | None = None

    def __repr__(self) -> str:
        return program_text(self)

    def _repr_html_(self) -> str:
        return program_html(self)

    @property
    def graph(self) -> fx.Graph:
        """The graph."""
        return self.graph_module.graph

    def node(self, name: str) -> fx.Node:
        """Return the node of that name; KeyError if it does not exist."""
        for node in self.graph.nodes:
            if node.name == name:
                return node
        raise KeyError(name)

    @property
    def nodes(self) -> dict[str, fx.Node]:
        """All nodes by name."""
        return {node.name: node for node in self.graph.nodes}

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Every parameter of the graph by its path; a tied one appears once, under its first path."""
        return dict(self.graph_module.named_parameters())

    @property
    def all_parameters(self) -> dict[str, Tensor]:
        """Parameters of the graph, and those that it does not read, which are written all the same."""
        unread = {path: tensor for path, tensor in self.unused.items() if isinstance(tensor, nn.Parameter)}
        return {**self.parameters, **unread}

    @property
    def left_dense(self) -> tuple[Refusal, ...]:
        """What is refused, and the parts of the decoder that its logits do not depend on."""
        unread = {path: tensor for path, tensor in self.unused.items() if isinstance(tensor, nn.Parameter)}
        sizes = {path: tensor.numel() for path, tensor in unread.items()}
        return (*self.refused, *unread_parts(sizes, self.parameters, self.logits_returned))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of all parameters by their paths."""
        return {path: tuple(tensor.shape) for path, tensor in self.all_parameters.items()}

    @property
    def size(self) -> int:
        """Number of all parameters, tied ones once."""
        return sum(tensor.numel() for tensor in self.all_parameters.values())

    @property
    def measured(self) -> bool:
        """Whether the capture compared the graph with the module, which takes a module with values."""
        return bool(self.identity)

    @property
    def device(self) -> torch.device:
        """Where the graph computes: where the decoder was captured, unless it was placed elsewhere."""
        return self.computes_on or next(self.tensors())[1].device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most parameters."""
        return main_dtype(self.parameters)

    @property
    def vocabulary_size(self) -> int:
        """Width of the logits."""
        return int(ops.logits_of(self.graph).meta["val"].shape[-1])

    @property
    def known_tokens(self) -> int:
        """Number of token ids that the decoder reads: the rows of its embedding, if one is found."""
        return tokens_read(self.graph) or self.vocabulary_size

    @property
    def text_tokens(self) -> int:
        """Number of token ids that a text may hold: the decoder reads them, and predicts them."""
        return min(self.known_tokens, self.vocabulary_size)

    @property
    def caches(self) -> dict[fx.Node, frozenset[fx.Node]]:
        """Every cached value that the graph takes or returns, with those that are the same cache.

        A cache goes in as `past_key_values.…` and comes out as `present.…`.
        """
        taken = [node for node in self.graph.nodes if node.op == "placeholder"]
        returned = self.graph.output_node().args[0]
        several = returned if isinstance(returned, list | tuple) else (returned,)
        values = dict(zip(self.outputs, several, strict=True))
        twins: dict[fx.Node, set[fx.Node]] = {}
        for name, past in zip(self.inputs, taken, strict=False):
            present = values.get(name.replace("past_key_values.", "present."))
            if isinstance(present, fx.Node) and name.startswith("past_key_values."):
                twins.setdefault(past, set()).add(present)
                twins.setdefault(present, set()).add(past)
        return {node: frozenset(others) for node, others in twins.items()}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters and buffers by path."""
        yield from self.graph_module.named_parameters()
        yield from self.graph_module.named_buffers()

    @property
    def dense_statistics(self) -> dict[str, Tensor]:
        """Statistics of whole weights that the graph holds as constants, by path."""
        return {path: tensor for path, tensor in self.tensors() if path.startswith(f"{DENSE_PREFIX}.")}

    def site(self, name: str) -> Site:
        """Return the site of that name; KeyError if it does not exist."""
        for site in self.sites:
            if site.name == name:
                return site
        raise KeyError(name)

    def clone(self) -> "Program":
        """Return a copy whose graph can be rewritten; tensors are shared until one is replaced."""
        graph = copy.deepcopy(self.graph)
        twin = copy.copy(self)
        twin.graph_module = with_tensors(graph, dict(self.tensors()))
        twin.hold_to(self.lengths)
        return twin

    def rebuild(self, tensors: Mapping[str, Tensor]) -> None:
        """Erase values that nobody uses and own the tensors that are left, taken from `tensors`.

        An outline of the graph as it was is dropped.
        """
        for node in reversed(list(self.graph.nodes)):
            if not node.users and node.op not in ("placeholder", "output") and not ops.mutates(node):
                self.graph.erase_node(node)
        self.graph_module = with_tensors(self.graph, tensors)
        self.hold_to(self.lengths)
        self.outline = None

    def hold_to(self, lengths: Lengths) -> None:
        """Let the graph raise for sequences outside of a range of lengths."""
        self.lengths = lengths
        whole = "attention_mask"  # of cached and new tokens
        hold_to(self.graph_module, lengths, self.inputs.index(whole) if whole in self.inputs else 0)


def main_dtype(parameters: Mapping[str, Tensor]) -> torch.dtype:
    """Return the dtype of most parameters, which transformers casts a decoder to when it loads one."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in parameters.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    return max(sizes, key=lambda dtype: sizes[dtype])


def require_program(program: Any) -> None:
    """Raise DispfxError for what is no program."""
    require_given(program, Program, "dispfx.capture(model) returns one")


def is_zero(tensor: Tensor) -> bool:
    """Whether a tensor is zero throughout; types of one byte have few operations of their own."""
    value = tensor.detach()
    return not bool(
        (value.float() if value.is_floating_point() and value.dtype.itemsize == 1 else value).any()
    )


def with_tensors(graph: fx.Graph, tensors: Mapping[str, Tensor]) -> fx.GraphModule:
    """Return a module of `graph` that owns, at their dotted paths, the tensors that it reads.

    The modules on the way are fresh containers, so replacing a tensor never reaches the decoder
    that was captured.  Parameters stay parameters; other tensors become buffers.
    """
    root = nn.Module()
    for path, tensor in tensors.items():
        own_tensor(root, path, tensor)
    return fx.GraphModule(root, graph, "Decoder")


def own_tensor(module: nn.Module, path: str, tensor: Tensor) -> tuple[nn.Module, str]:
    """Register a tensor under its dotted path, in fresh containers; return its owner and its name there."""
    *parents, name = path.split(".")
    owner = module
    for parent in parents:
        # A container may have the name of a field of the module; its own prefix keeps the two apart.
        if parent not in owner._modules:
            owner.add_module(parent, nn.Module())
        owner = owner.get_submodule(parent)
    if isinstance(tensor, nn.Parameter):
        owner.register_parameter(name, tensor)
    else:
        owner.register_buffer(name, tensor)
    return owner, name


def unread_parts(unread: Mapping[str, int], read: Iterable[str], outputs: int) -> tuple[Refusal, ...]:
    """Return the largest modules without any read parameter, with their sizes.

    Args:
        unread: size of each parameter that the logits do not depend on, by path.
        read: paths of the parameters that they depend on.
        outputs: how many tensors of the logits' shape the decoder returns.
    """
    in_use = {prefix for path in read for prefix in _prefixes(path)}
    sizes: dict[str, int] = {}
    for path, size in unread.items():
        part = next(prefix for prefix in (*_prefixes(path), path) if prefix not in in_use)
        sizes[part] = sizes.get(part, 0) + size
    of = f", one of {outputs} outputs of that shape" if outputs > 1 else ""
    return tuple(
        Refusal(part, f"not read for the logits{of}; {size:,} parameters are kept as they are")
        for part, size in sizes.items()
    )


def _prefixes(path: str) -> Iterator[str]:
    """Yield the paths of the modules around a parameter, the outermost first."""
    parts = path.split(".")
    for end in range(1, len(parts)):
        yield ".".join(parts[:end])
