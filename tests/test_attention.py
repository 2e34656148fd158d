"""Attention probabilities from inside modules that never return them."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional

from vlcam.anatomy import Tap
from vlcam.attention import AttentionMode

TAP = Tap("fusion", 0, "CROSS")


class Fused(nn.Module):
    """Fused attention [B, H, L, D] over keys and values [B, G, S, D]."""

    def forward(self, query, key, value, **options):
        return functional.scaled_dot_product_attention(query, key, value, **options)


class Explicit(nn.Module):
    """Attention whose softmax is written out, by whichever of torch's names."""

    def __init__(self, softmax):
        super().__init__()
        self.softmax = softmax

    def forward(self, query, key, value):
        return self.softmax(query @ key.mT / math.sqrt(query.shape[-1])) @ value


class Recorder:
    """Keeps what is taken, as a tensor that a gradient can be asked of, and hands it on."""

    def __init__(self):
        self.seen = []

    def __call__(self, tap, tensor):
        kept = tensor if tensor.requires_grad else tensor.detach().requires_grad_()
        self.seen.append((tap, kept))
        return kept


def tapped(module, *args, take, **options):
    mode = AttentionMode(take)
    mode.stack.append(TAP)
    with mode:
        return module(*args, **options)


def tensors(heads=4, groups=4, queries=5, keys=6):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, heads, queries, 8, generator=generator)
    key, value = torch.randn(2, 2, groups, keys, 8, generator=generator)
    return query, key, value


BOOLEAN = torch.tensor([1, 1, 0, 1, 0, 1], dtype=torch.bool).expand(5, 6)
ADDED = torch.linspace(-3, 3, 30).reshape(5, 6)
EMPTY_ROW = BOOLEAN.clone().index_fill(0, torch.tensor([2]), value=False)
SOFTMAX = {
    "functional.softmax": lambda scores: functional.softmax(scores, dim=-1),
    "torch.softmax": lambda scores: torch.softmax(scores, -1),
    "Tensor.softmax": lambda scores: scores.softmax(-1),
    "nn.Softmax": nn.Softmax(-1),
}
CASES = {
    "plain": ({}, {}),
    "bool mask": ({}, {"attn_mask": BOOLEAN}),
    "bool mask per head": ({}, {"attn_mask": BOOLEAN.expand(2, 4, 5, 6)}),
    "float mask": ({}, {"attn_mask": ADDED}),
    "mask with minus infinity": ({}, {"attn_mask": torch.zeros(5, 6).masked_fill(~BOOLEAN, -math.inf)}),
    "causal": ({"queries": 6}, {"is_causal": True}),
    "causal, fewer queries": ({}, {"is_causal": True}),
    "causal, more queries": ({"queries": 9}, {"is_causal": True}),
    "scale": ({}, {"scale": 0.7}),
    "scale of zero": ({}, {"scale": 0.0}),
    "grouped queries": ({"groups": 2}, {"enable_gqa": True}),
    "one group and a mask": ({"groups": 1}, {"enable_gqa": True, "attn_mask": BOOLEAN}),
}


def probabilities_of(query, key, *, attn_mask=None, is_causal=False, scale=None):
    """The probabilities of one query row after the other."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    rows = []
    for t in range(query.shape[2]):
        scores = scale * torch.einsum("bhd,bhsd->bhs", query[:, :, t], key)
        for j in range(key.shape[2]):
            if is_causal and j > t:
                scores[..., j] = -math.inf
            elif attn_mask is not None:
                bias = attn_mask[..., t, j].float()
                scores[..., j] += torch.log(bias) if attn_mask.dtype == torch.bool else bias
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        rows.append(weights / weights.sum(-1, keepdim=True))
    return torch.stack(rows, 2)


@pytest.mark.parametrize(("sizes", "options"), CASES.values(), ids=CASES)
def test_the_output_is_that_of_fused_attention(sizes, options):
    inputs = tensors(**sizes)
    recorder = Recorder()
    found = tapped(Fused(), *inputs, take=recorder, **options)
    assert [tap for tap, _ in recorder.seen] == [TAP]
    assert torch.allclose(found, Fused()(*inputs, **options), atol=1e-6)


@pytest.mark.parametrize(("sizes", "options"), CASES.values(), ids=CASES)
def test_the_probabilities_are_the_reference_ones_and_rows_sum_to_one(sizes, options):
    query, key, value = tensors(**sizes)
    recorder = Recorder()
    tapped(Fused(), query, key, value, take=recorder, **options)
    ((_, found),) = recorder.seen
    keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    wanted = probabilities_of(query, keys, **{k: v for k, v in options.items() if k != "enable_gqa"})
    assert torch.allclose(found.sum(-1), torch.ones(()), atol=1e-6)
    assert torch.allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize(("sizes", "options"), CASES.values(), ids=CASES)
def test_the_gradient_at_the_probabilities_is_that_of_the_weighted_values(sizes, options):
    query, key, value = tensors(**sizes)
    recorder = Recorder()
    output = tapped(Fused(), query, key, value, take=recorder, **options)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    ((_, taken),) = recorder.seen
    (found,) = torch.autograd.grad((output * upstream).sum(), taken)
    # y = sum of upstream * (A @ v), so dy/dA[t,j] is the dot product of upstream[t] and v[j].
    values = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    assert torch.allclose(found, torch.einsum("bhtd,bhjd->bhtj", upstream, values), atol=1e-5)


def test_gradients_pass_through_to_the_inputs_as_in_fused_attention():
    inputs = [tensor.requires_grad_() for tensor in tensors()]
    found = torch.autograd.grad(tapped(Fused(), *inputs, take=Recorder(), attn_mask=ADDED).square().sum(), inputs)
    wanted = torch.autograd.grad(Fused()(*inputs, attn_mask=ADDED).square().sum(), inputs)
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(found, wanted, strict=True))


def test_a_row_that_may_look_nowhere_gives_what_fused_attention_gives():
    inputs = [tensor.requires_grad_() for tensor in tensors()]
    found = tapped(Fused(), *inputs, take=Recorder(), attn_mask=EMPTY_ROW)
    wanted = Fused()(*inputs, attn_mask=EMPTY_ROW)
    assert torch.allclose(found, wanted, atol=1e-6)
    gradients = [torch.autograd.grad(output.square().sum(), inputs) for output in (found, wanted)]
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(*gradients, strict=True))


def test_dropout_falls_on_what_follows_the_probabilities():
    torch.manual_seed(0)
    inputs = tensors()
    recorder = Recorder()
    dropped = tapped(Fused(), *inputs, take=recorder, dropout_p=0.5)
    ((_, found),) = recorder.seen
    assert torch.allclose(found.sum(-1), torch.ones(()), atol=1e-6)
    assert not torch.allclose(dropped, Fused()(*inputs), atol=1e-3)


def test_positional_options_mean_the_same():
    query, key, value = tensors()
    found = tapped(
        lambda *args: functional.scaled_dot_product_attention(*args), query, key, value, BOOLEAN, take=Recorder()
    )
    assert torch.allclose(found, Fused()(query, key, value, attn_mask=BOOLEAN), atol=1e-6)


@pytest.mark.parametrize("softmax", SOFTMAX.values(), ids=SOFTMAX)
def test_softmax_is_seen_once_by_every_name(softmax):
    query, key, value = tensors()
    recorder = Recorder()
    output = tapped(Explicit(softmax), query, key, value, take=recorder)
    ((tap, found),) = recorder.seen
    assert tap == TAP
    assert torch.allclose(found, probabilities_of(query, key), atol=1e-6)
    assert torch.allclose(output, Fused()(query, key, value), atol=1e-6)
    (gradient,) = torch.autograd.grad(output.sum(), found)
    assert torch.allclose(gradient, value.sum(-1)[:, :, None].expand_as(found), atol=1e-5)


@pytest.mark.parametrize("module", [Fused(), Explicit(nn.Softmax(-1))], ids=["fused", "explicit"])
def test_the_module_computes_on_with_what_take_returns(module):
    inputs = tensors()
    assert torch.allclose(tapped(module, *inputs, take=lambda _, t: 2 * t), 2 * module(*inputs), atol=1e-6)


def test_the_innermost_module_on_the_stack_is_named():
    inner = Tap("fusion", 1, "CROSS")
    recorder = Recorder()
    mode = AttentionMode(recorder)
    with mode:
        mode.stack += [TAP, inner]
        torch.softmax(torch.zeros(2), 0)
        mode.stack.pop()
        torch.softmax(torch.zeros(2), 0)
    assert [tap for tap, _ in recorder.seen] == [inner, TAP]


def test_outside_a_tapped_module_nothing_is_taken_or_changed():
    inputs = tensors()
    recorder = Recorder()
    with AttentionMode(recorder):
        fused = Fused()(*inputs, attn_mask=BOOLEAN)
        explicit = Explicit(nn.Softmax(-1))(*inputs)
    assert recorder.seen == []
    assert torch.equal(fused, Fused()(*inputs, attn_mask=BOOLEAN))
    assert torch.equal(explicit, Explicit(nn.Softmax(-1))(*inputs))


def test_after_the_mode_nothing_is_taken():
    recorder = Recorder()
    mode = AttentionMode(recorder)
    mode.stack.append(TAP)
    with mode:
        pass
    Fused()(*tensors())
    assert recorder.seen == []


def test_other_functions_pass_through_a_tapped_module():
    recorder = Recorder()
    found = tapped(nn.GELU(), torch.ones(3), take=recorder)
    assert recorder.seen == []
    assert torch.equal(found, nn.GELU()(torch.ones(3)))


def test_another_thread_is_not_affected():
    inputs = tensors()
    recorder = Recorder()
    mode = AttentionMode(recorder)
    mode.stack.append(TAP)
    with ThreadPoolExecutor(1) as pool, mode:
        found = pool.submit(Fused(), *inputs).result()
        assert recorder.seen == []
        Fused()(*inputs)
    assert len(recorder.seen) == 1
    assert torch.equal(found, Fused()(*inputs))
