"""The loss in chunks is the loss of all logits, and so is its gradient."""

import weakref

import pytest
import torch
import torch.nn.functional as F

from dispfx.fast_decoder.head_loss import chunked_loss, loss_and_gradient
from dispfx.learning.divergence import even_rows
from dispfx.learning.objective import NO_TARGET, next_token_loss, next_tokens

BATCH, TOKENS, WIDTH, VOCABULARY = 3, 7, 8, 11
HEAD = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(3))


def head(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (WIDTH,)) @ HEAD.to(x.dtype).T


@pytest.mark.parametrize("rows", [1, 4, 5, 21, 100])
def test_chunks_give_the_loss_and_the_gradient_of_the_whole(rows):
    ids = torch.randint(VOCABULARY, (BATCH, TOKENS))
    x = torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True)
    whole = next_token_loss(head(x), ids)
    (expected,) = torch.autograd.grad(2 * whole, x)
    loss = chunked_loss(head, x, next_tokens(ids), rows)
    (gradient,) = torch.autograd.grad(2 * loss, x)
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)
    with torch.no_grad():
        assert torch.equal(chunked_loss(head, x, next_tokens(ids), rows), loss.detach())


def test_tokens_without_a_target_count_for_nothing():
    ids = torch.randint(VOCABULARY, (1, TOKENS))
    targets = next_tokens(ids)
    assert int(targets[0, -1]) == NO_TARGET
    targets[0, 2] = NO_TARGET
    x = torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    expected = F.cross_entropy(head(x)[0], targets[0], ignore_index=NO_TARGET)
    loss = chunked_loss(head, x, targets, 2)
    torch.testing.assert_close(loss, expected)
    (gradient,) = torch.autograd.grad(loss, x)
    assert bool((gradient[0, 2] == 0).all()) and bool((gradient[0, 3] != 0).any())


def test_a_gradient_in_bfloat16_is_that_of_the_whole_in_bfloat16():
    ids = torch.randint(VOCABULARY, (BATCH, TOKENS))
    x = torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    (expected,) = torch.autograd.grad(next_token_loss(head(x), ids), x)
    (gradient,) = torch.autograd.grad(chunked_loss(head, x, next_tokens(ids), 4), x)
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient, expected, rtol=0.02, atol=1e-4)


def test_nothing_of_a_chunk_is_there_when_the_next_one_begins():
    made: list[weakref.ref[torch.UntypedStorage]] = []

    def watch(tensor: torch.Tensor) -> torch.Tensor:
        made.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    def watched_head(x: torch.Tensor) -> torch.Tensor:
        assert not [one for one in made if one() is not None]
        return watch(head(x))

    def watched_loss(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss, gradient = loss_and_gradient(*given)
        return loss, watch(gradient)

    ids = torch.randint(VOCABULARY, (BATCH, TOKENS))
    x = torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True)
    chunked_loss(watched_head, x, next_tokens(ids), 7, watched_loss)
    assert len(made) == 2 * 3


@pytest.mark.parametrize(
    ("count", "most", "rows"), [(12, 5, 4), (2048, 2097, 2048), (8192, 1365, 1024), (13, 5, 5)]
)
def test_chunks_are_even_where_that_costs_few_more(count, most, rows):
    assert even_rows(count, most) == rows
