"""What dispfx refuses, at which pass, and what it says."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dispfx
from dispfx.errors import CaptureError, UnsupportedGraphError
from tests.one_branch import INNER, VOCABULARY, WIDTH, Middle, one_branch, require_one_function
from tests.plain_decoders import perturb


class Decoder(nn.Module):
    """Two MLPs around an arrangement that a test writes; `mix` are learned weights."""

    def __init__(self, arrange: Callable[["Decoder", Tensor], Tensor]):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first, self.second = Middle(lambda m, h: F.gelu(h)), Middle(lambda m, h: F.gelu(h))
        self.mix = nn.Parameter(torch.rand(4, 2, 2))
        self.narrow = nn.Linear(WIDTH, WIDTH // 2)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.arrange = arrange

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.arrange(self, self.embedding(ids)))


def decoder(arrange: Callable[[Decoder, Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return perturb(Decoder(arrange))


def without_residual(m: Decoder, x: Tensor) -> Tensor:
    return m.second(m.first(x))


def mixed_streams(m: Decoder, x: Tensor) -> Tensor:
    """Two streams, which learned weights mix before and after every branch."""
    streams = torch.stack([x, 0.5 * x], dim=-2)
    for at, branch in enumerate((m.first, m.second)):
        streams = m.mix[2 * at] @ streams
        streams = m.mix[2 * at + 1] @ torch.stack([streams[..., 0, :] + branch(streams[..., 0, :]),
                                                   streams[..., 1, :]], dim=-2)  # fmt: skip
    return streams.sum(-2)


def reversible(m: Decoder, x: Tensor) -> Tensor:
    """Two streams that each layer crosses."""
    a, b = x, x
    a = a + m.first(b)
    b = b + m.second(a)
    return a * b


def projected_between(m: Decoder, x: Tensor) -> Tensor:
    """A product stands in the stream itself."""
    x = x + m.first(x)
    x = F.pad(m.narrow(x), (0, WIDTH // 2))
    return x + m.second(x)


STREAMS = {
    "no residual branch": (without_residual, "no addition in this graph is one"),
    "streams mixed by learned weights": (mixed_streams, "stream"),
    "reversible layers": (reversible, "no residual addition is crossed by every path"),
    "a product in the stream": (projected_between, "computed from several streams"),
}


@pytest.mark.parametrize("name", sorted(STREAMS))
def test_a_decoder_without_one_residual_stream_is_refused_whole(name: str):
    """Rule 4 of find_residual_stream."""
    arrange, reason = STREAMS[name]
    with pytest.raises(UnsupportedGraphError, match=reason) as error:
        dispfx.capture(decoder(arrange))
    assert error.value.exit_code == 2 and error.value.where


INNER_SITES: dict[str, tuple[Callable[[Middle, Tensor], Tensor], int, str]] = {
    "a softmax over the features": (lambda m, h: h.softmax(-1), INNER, "softmax combines all features"),
    "a norm over the features": (lambda m, h: F.layer_norm(h, (INNER,)), INNER, "layer_norm combines all"),
    "the largest feature": (lambda m, h: h - h.amax(-1, keepdim=True), INNER, "amax combines all features"),
    "a reshape that splits the features": (
        lambda m, h: h.unflatten(-1, (4, 6)).softmax(-1).flatten(-2), INNER,
        "a reshape splits the features into groups",
    ),
    "an operation without a rule": (lambda m, h: h.tril(), INNER, "no rule is known for aten"),
    "one position for two features": (
        lambda m, h: h + torch.cat([h[..., 1:], h[..., :1]], -1), INNER,
        "one position would follow two features",
    ),
    "an order that depends on the text": (lambda m, h: h[..., h[0, 0].argsort()], INNER, "aten.index"),
    "a pad that mirrors": (lambda m, h: F.pad(h, (2, 1), mode="reflect"), INNER + 3, "aten.pad combines"),
    "a roll of everything": (lambda m, h: h.roll(1), INNER, "aten.roll combines all features"),
    "a scan over the features": (lambda m, h: h.cumsum(-1), INNER, "aten.cumsum combines all features"),
    "a sort": (lambda m, h: h.sort(-1).values, INNER, "aten.sort combines all features"),
    "shuffled groups": (
        lambda m, h: h.unflatten(-1, (4, 6)).transpose(-1, -2).flatten(-2), INNER,
        "a reshape splits the features into groups",
    ),
    "a normalised length": (lambda m, h: F.normalize(h, dim=-1), INNER, "aten.linalg_vector_norm combines"),
    "a quantile": (lambda m, h: h - h.quantile(0.5, -1, True), INNER, "no rule is known for aten.quantile"),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(INNER_SITES))
def test_an_inner_site_is_refused_where_its_features_do_not_stay_apart(name: str):
    """Rule 7 of label_map."""
    middle, down, reason = INNER_SITES[name]
    model = one_branch(lambda: Middle(middle, down=down))
    program = dispfx.capture(model)
    assert [site.kind for site in program.sites] == ["read", "write"]
    require_one_function(model, program)
    (refusal,) = program.refused
    assert refusal.name == "mlp.inner" and reason in refusal.reason
    assert refusal.source is not None


def test_a_scan_over_tokens_makes_a_mixer_whose_features_stay_apart():
    model = one_branch(lambda: Middle(lambda m, h: h.cumsum(1)))
    program = dispfx.capture(model)
    assert [leaf.kind for leaf in program.leaves] == ["mixer"]
    assert [site.kind for site in program.sites] == ["read", "inner", "write"] and not program.refused
    require_one_function(model, program)


class Heads(nn.Module):
    """Attention over two heads; what comes out of them passes through a function before the projection."""

    def __init__(self, after: Callable[[Tensor], Tensor]):
        super().__init__()
        self.qkv, self.out, self.after = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), after

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        return self.out(self.after(y))


def test_heads_are_left_whole_without_a_refusal():
    program = dispfx.capture(one_branch(lambda: Heads(F.gelu)))
    assert [site.kind for site in program.sites] == ["read", "write"] and not program.refused


def test_what_stops_the_features_of_heads_otherwise_is_named():
    program = dispfx.capture(one_branch(lambda: Heads(lambda y: y.cumsum(-1))))
    (refusal,) = program.refused
    assert refusal.name == "mlp.inner" and refusal.reason == "aten.cumsum combines all features"
    assert refusal.source is not None and "test_refusals.py:" in refusal.source


class WrittenAndRead(nn.Module):
    """What the branch writes feeds a product of its own as well."""

    def __init__(self):
        super().__init__()
        self.body, self.gate = Middle(lambda m, h: F.gelu(h)), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return y * torch.sigmoid(self.gate(y))


def test_a_written_value_that_feeds_a_product_has_one_selection_for_both():
    model = one_branch(WrittenAndRead)
    program = dispfx.capture(model)
    assert [site.kind for site in program.sites] == ["read", "inner", "inner"]
    assert {cut.parameter for cut in program.sites[2].slices} == {
        "mlp.body.down.weight", "mlp.body.down.bias", "mlp.gate.weight",
    }  # fmt: skip
    require_one_function(model, program)


class StreamInside(nn.Module):
    """The branch multiplies what it writes by the stream itself."""

    def __init__(self):
        super().__init__()
        self.body = Middle(lambda m, h: F.gelu(h))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * x


def test_a_write_that_is_bound_to_the_stream_is_refused():
    """Rule 7 of label_map."""
    program = dispfx.capture(one_branch(StreamInside))
    assert [(refusal.name.split(".")[-1], refusal.reason) for refusal in program.refused] == [
        ("write", "the features reach the residual stream itself")
    ]


class TiedToHead(nn.Module):
    """The down projection's weight is the head's too."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.down.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return self.head(x + self.down(F.gelu(self.up(x))))


def test_a_write_whose_rows_are_logits_is_refused():
    torch.manual_seed(0)
    program = dispfx.capture(TiedToHead())
    reasons = {refusal.name: refusal.reason for refusal in program.refused}
    assert "the features reach the decoder's output" in reasons.values()
    assert not any(site.kind == "write" for site in program.sites)


class Encoder(nn.Module):
    """Returns one vector a sequence, not one a token."""

    def __init__(self):
        super().__init__()
        self.embedding, self.pool = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.pool(self.embedding(ids).mean(1))


class Loop(nn.Module):
    """A recurrence in Python, which a trace unrolls to the traced length."""

    def __init__(self):
        super().__init__()
        self.embedding, self.cell = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x, state, states = self.embedding(ids), torch.zeros(ids.shape[0], WIDTH), []
        for step in range(ids.shape[1]):
            state = torch.tanh(self.cell(state) + x[:, step])
            states.append(state)
        return self.head(x + torch.stack(states, 1))


class Branching(nn.Module):
    """Python control flow on a value."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return self.head(x if x.sum() > 0 else -x)


class NoWords(nn.Module):
    def forward(self, ids: Tensor) -> Tensor:
        return ids.float()


CAPTURES = {
    "an encoder": (Encoder, r"logits of shape \(3, 13, 'V'\) were expected"),
    "a loop over time": (Loop, "does not run at"),
    "control flow on a value": (Branching, "torch.export cannot capture this module"),
    "no parameters": (NoWords, "a decoder has parameters"),
    "no token ids": (lambda: nn.Linear(WIDTH, WIDTH), "the module must take token ids"),
}


@pytest.mark.parametrize("name", sorted(CAPTURES))
def test_what_is_no_decoder_of_token_ids_is_refused_at_capture(name: str):
    make, reason = CAPTURES[name]
    with pytest.raises(CaptureError, match=reason) as error:
        dispfx.capture(make().eval())
    assert error.value.exit_code == 2 and (error.value.where or error.value.hint)


def test_something_else_than_a_module_is_refused():
    with pytest.raises(CaptureError, match=r"capture takes an nn\.Module, but \[\] was given"):
        dispfx.capture([])  # type: ignore[arg-type]


def test_a_decoder_in_which_nothing_can_be_pruned_says_every_reason():
    class Dense(nn.Module):
        """A branch that binds everything it touches to the stream or to itself."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight.softmax(0)).softmax(-1)

    with pytest.raises(UnsupportedGraphError, match="at least one branch must be prunable") as error:
        dispfx.capture(one_branch(Dense))
    assert "softmax" in str(error.value)


class NoFeatures(nn.Module):
    """A gated layer of width 0 and an attention of 0 heads next to it."""

    def __init__(self):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch tells that there is nothing to initialise
            self.gate, self.up, self.down = (
                nn.Linear(*sizes) for sizes in ((WIDTH, 0), (WIDTH, 0), (0, WIDTH))
            )
            self.value, self.out = nn.Linear(WIDTH, 0), nn.Linear(0, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.value(x).view(*x.shape[:2], 0, 16).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        joined = mixed.transpose(1, 2).reshape(*x.shape[:2], 0)
        return self.down(F.silu(self.gate(x)) * self.up(x)) + self.out(joined)


class WithNoFeatures(nn.Module):
    """A branch with features plus one without."""

    def __init__(self):
        super().__init__()
        self.full, self.empty = Middle(lambda m, h: F.gelu(h)), NoFeatures()

    def forward(self, x: Tensor) -> Tensor:
        return self.full(x) + self.empty(x)


@pytest.mark.parametrize("select", ["after-norm", "before-norm"])
def test_a_layer_of_width_0_has_no_site_and_the_others_are_cut(select):
    """Rule 6 of find_sites."""
    model = one_branch(WithNoFeatures)
    program = dispfx.capture(model, select=select)
    assert "a layer of width 0 has no features" in {refusal.reason for refusal in program.refused}
    cut = {piece.parameter for site in program.sites for piece in site.slices}
    assert {"mlp.full.up.weight", "mlp.full.down.weight"} <= cut
    assert {site.kind for site in program.sites} >= {"inner"}
    require_one_function(model, program)
