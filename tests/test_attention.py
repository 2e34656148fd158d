"""Scores, probabilities and heads from inside attention modules that never return them."""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from vlcam.anatomy import KEYS as KEYS_SITE
from vlcam.anatomy import QUERIES as QUERIES_SITE
from vlcam.anatomy import SCORES, VALUES, Reading, Tap
from vlcam.attention import AttentionMode, Edit, Watched
from vlcam.errors import CaptureError
from vlcam.taps import Taps

TAP = Tap("fusion", 0, "CROSS")
SCORE_TAP = Tap("fusion", 0, SCORES)
HEADS_TAP = Tap("fusion", 0, "F3_HEADS")
ATTENTION = {"attention": TAP}
EVERYTHING = {"attention": TAP, "scores": SCORE_TAP, "heads": HEADS_TAP}
QUERY_TAP, KEY_TAP, VALUE_TAP = (Tap("fusion", 0, site) for site in (QUERIES_SITE, KEYS_SITE, VALUES))
MIXED = {"queries": QUERY_TAP, "keys": KEY_TAP, "values": VALUE_TAP}
ONE_HEAD, IDENTITY = Edit("one_head"), Edit("identity")


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

    def __getitem__(self, tap):
        (found,) = [tensor for seen, tensor in self.seen if seen == tap]
        return found


def tapped(module, *args, take, watched=ATTENTION, edit=None, **options):
    mode = AttentionMode(take)
    mode.stack.append(Watched(watched, edit or Edit()))
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
        mode.stack += [Watched(ATTENTION), Watched({"attention": inner})]
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
    mode.stack.append(Watched(ATTENTION))
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
    mode.stack.append(Watched(ATTENTION))
    with ThreadPoolExecutor(1) as pool, mode:
        found = pool.submit(Fused(), *inputs).result()
        assert recorder.seen == []
        Fused()(*inputs)
    assert len(recorder.seen) == 1
    assert torch.equal(found, Fused()(*inputs))


# ---------------------------------------------------------------- the scores of fused and of written-out attention


@pytest.mark.parametrize(("sizes", "options"), CASES.values(), ids=CASES)
def test_the_softmax_of_the_scores_is_the_attention(sizes, options):
    inputs = tensors(**sizes)
    recorder = Recorder()
    found = tapped(Fused(), *inputs, take=recorder, watched=EVERYTHING, **options)
    assert [tap for tap, _ in recorder.seen] == [SCORE_TAP, TAP]  # fused attention concatenates no heads
    assert torch.allclose(recorder[SCORE_TAP].softmax(-1), recorder[TAP], atol=1e-6)
    assert torch.allclose(found, Fused()(*inputs, **options), atol=1e-6)


@pytest.mark.parametrize("softmax", SOFTMAX.values(), ids=SOFTMAX)
def test_the_scores_are_what_a_written_out_softmax_takes(softmax):
    query, key, value = tensors()
    recorder = Recorder()
    tapped(Explicit(softmax), query, key, value, take=recorder, watched=EVERYTHING)
    assert torch.allclose(recorder[SCORE_TAP], query @ key.mT / math.sqrt(8), atol=1e-6)
    assert torch.allclose(recorder[SCORE_TAP].softmax(-1), recorder[TAP], atol=1e-6)


@pytest.mark.parametrize("module", [Fused(), Explicit(nn.Softmax(-1))], ids=["fused", "explicit"])
def test_the_module_computes_on_with_the_scores_that_take_returns(module):
    inputs = tensors()
    flat = tapped(
        module, *inputs, take=lambda tap, t: torch.zeros_like(t) if tap == SCORE_TAP else t, watched=EVERYTHING
    )
    assert torch.allclose(flat, inputs[2].mean(2, keepdim=True).expand_as(flat), atol=1e-6)


@pytest.mark.parametrize("module", [Fused(), Explicit(nn.Softmax(-1))], ids=["fused", "explicit"])
def test_the_gradient_at_the_scores_is_that_through_the_softmax(module):
    query, key, value = tensors()
    recorder = Recorder()
    output = tapped(module, query, key, value, take=recorder, watched=EVERYTHING)
    at_scores, at_attention = torch.autograd.grad(output.square().sum(), [recorder[SCORE_TAP], recorder[TAP]])
    attention = recorder[TAP]
    through = attention * (at_attention - (at_attention * attention).sum(-1, keepdim=True))
    assert torch.allclose(at_scores, through, atol=1e-6)


def test_only_what_is_watched_is_taken():
    recorder = Recorder()
    tapped(Fused(), *tensors(), take=recorder, watched={"scores": SCORE_TAP})
    assert [tap for tap, _ in recorder.seen] == [SCORE_TAP]


# ---------------------------------------------------------------- queries, keys and values


@pytest.mark.parametrize(("sizes", "options"), CASES.values(), ids=CASES)
def test_queries_keys_and_values_of_fused_attention_are_its_inputs(sizes, options):
    query, key, value = tensors(**sizes)
    recorder = Recorder()
    found = tapped(Fused(), query, key, value, take=recorder, watched=ATTENTION | MIXED, **options)
    groups = query.shape[1] // key.shape[1]
    assert torch.equal(recorder[QUERY_TAP], query)
    assert torch.equal(recorder[KEY_TAP], key.repeat_interleave(groups, 1))
    assert torch.equal(recorder[VALUE_TAP], value.repeat_interleave(groups, 1))
    assert torch.allclose(found, Fused()(query, key, value, **options), atol=1e-6)


@pytest.mark.parametrize("softmax", SOFTMAX.values(), ids=SOFTMAX)
def test_queries_keys_and_values_of_written_out_attention_are_those_of_its_products(softmax):
    query, key, value = tensors()
    recorder = Recorder()
    found = tapped(Explicit(softmax), query, key, value, take=recorder, watched=ATTENTION | MIXED)
    assert torch.equal(recorder[QUERY_TAP], query)
    assert torch.equal(recorder[KEY_TAP], key)
    assert torch.equal(recorder[VALUE_TAP], value)
    assert torch.allclose(found, Fused()(query, key, value), atol=1e-6)


def test_the_values_that_take_returns_are_what_is_mixed():
    inputs = tensors()
    for module in (Fused(), Explicit(nn.Softmax(-1))):
        found = tapped(module, *inputs, take=lambda tap, t: 2 * t if tap == VALUE_TAP else t, watched=ATTENTION | MIXED)
        assert torch.allclose(found, 2 * module(*inputs), atol=1e-6)


# ---------------------------------------------------------------- attention that is computed otherwise


def joined(heads):
    """[B, 1, N, H * d]."""
    return heads.transpose(1, 2).flatten(2)[:, None]


def split(mixed, heads):
    """[B, H, N, d] from what one head gives."""
    return mixed[:, 0].unflatten(-1, (heads, -1)).transpose(1, 2)


@pytest.mark.parametrize(("sizes", "options"), CASES.values(), ids=CASES)
def test_one_head_of_full_width_scores_all_channels_at_once(sizes, options):
    query, key, value = tensors(**sizes)
    recorder = Recorder()
    watched = ATTENTION | {"scores": SCORE_TAP} | MIXED
    found = tapped(Fused(), query, key, value, take=recorder, watched=watched, edit=ONE_HEAD, **options)
    groups = query.shape[1] // key.shape[1]
    one = [joined(each) for each in (query, *(each.repeat_interleave(groups, 1) for each in (key, value)))]
    # Whatever scale the model has, that of one head is the root of its width.
    masks = {k: v for k, v in options.items() if k not in ("enable_gqa", "scale")}
    if "attn_mask" in masks and masks["attn_mask"].ndim == 4:  # the same for every head
        masks["attn_mask"] = masks["attn_mask"][:, :1]
    wanted = probabilities_of(one[0], one[1], **masks)
    assert recorder[TAP].shape == (2, 1, query.shape[2], 6)
    assert torch.allclose(recorder[TAP], wanted, atol=1e-6)
    assert all(torch.equal(recorder[tap], each) for tap, each in zip((QUERY_TAP, KEY_TAP, VALUE_TAP), one, strict=True))
    assert found.shape == query.shape
    assert torch.allclose(found, split(wanted @ one[2], 4), atol=1e-6)


def test_gradients_pass_through_one_head():
    inputs = [each.requires_grad_() for each in tensors()]
    found = tapped(Fused(), *inputs, take=Recorder(), edit=ONE_HEAD)
    wanted = split(Fused()(*[joined(each) for each in inputs]), 4)
    gradients = [torch.autograd.grad(output.square().sum(), inputs) for output in (found, wanted)]
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(*gradients, strict=True))


def test_one_head_of_a_module_that_has_one_is_its_own():
    inputs = tensors(heads=1, groups=1)
    found = tapped(Fused(), *inputs, take=Recorder(), edit=ONE_HEAD)
    assert torch.allclose(found, Fused()(*inputs), atol=1e-6)


@pytest.mark.parametrize("gradients", [True, False])
def test_heads_that_each_have_a_mask_of_their_own_cannot_be_joined(gradients):
    by_head = torch.randn(1, 4, 5, 6, generator=torch.Generator().manual_seed(2))
    with torch.set_grad_enabled(gradients), pytest.raises(CaptureError, match="attention='one_head'"):
        tapped(Fused(), *tensors(), take=Recorder(), edit=ONE_HEAD, attn_mask=by_head)


@pytest.mark.parametrize("edit", [ONE_HEAD, Edit("one_head", head_scale=True)], ids=["own scale", "scale of a head"])
@pytest.mark.parametrize("softmax", SOFTMAX.values(), ids=SOFTMAX)
def test_heads_whose_softmax_is_written_out_are_joined_as_fused_ones_are(softmax, edit):
    inputs = tensors()
    written, fused = Recorder(), Recorder()
    watched = ATTENTION | {"values": VALUE_TAP}
    found = tapped(Explicit(softmax), *inputs, take=written, watched=watched, edit=edit)
    wanted = tapped(Fused(), *inputs, take=fused, watched=watched, edit=edit)
    assert found.shape == inputs[0].shape
    assert torch.allclose(found, wanted, atol=1e-6)
    assert all(torch.allclose(written[tap], fused[tap], atol=1e-6) for tap in (TAP, VALUE_TAP))
    query, key, value = map(joined, inputs)
    width = inputs[0].shape[-1] if edit.head_scale else query.shape[-1]
    by_hand = (query @ key.mT / math.sqrt(width)).softmax(-1)
    assert torch.allclose(written[TAP], by_hand, atol=1e-6)
    assert torch.allclose(found, split(by_hand @ value, 4), atol=1e-6)


class ByBatch(nn.Module):
    """Attention whose heads are part of the batch."""

    def forward(self, query, key, value):
        query, key, value = (each.flatten(0, 1) for each in (query, key, value))
        return torch.bmm(torch.bmm(query, key.mT).softmax(-1), value)


def test_heads_that_are_no_axis_of_their_own_cannot_be_joined():
    with pytest.raises(CaptureError, match=r"^attention='one_head': .* \(8, 5, 6\), cannot be joined; .* fused"):
        tapped(ByBatch(), *tensors(), take=Recorder(), edit=ONE_HEAD)


@pytest.mark.parametrize(("sizes", "options"), CASES.values(), ids=CASES)
def test_identity_hands_every_token_its_own_value_whatever_the_mask(sizes, options):
    query, key, value = tensors(**{**sizes, "queries": 6})
    options = {k: v for k, v in options.items() if k != "attn_mask"}
    recorder = Recorder()
    found = tapped(Fused(), query, key, value, take=recorder, edit=IDENTITY, **options)
    assert torch.equal(recorder[TAP], torch.eye(6).expand(2, 4, 6, 6))
    assert torch.equal(found, value.repeat_interleave(4 // value.shape[1], 1))
    masked = tapped(Fused(), query, key, value, take=Recorder(), edit=IDENTITY, attn_mask=ADDED[:1], **options)
    assert torch.equal(masked, found)


@pytest.mark.parametrize("softmax", SOFTMAX.values(), ids=SOFTMAX)
def test_identity_of_written_out_attention(softmax):
    query, key, value = tensors(queries=6)
    recorder = Recorder()
    found = tapped(Explicit(softmax), query, key, value, take=recorder, edit=IDENTITY)
    assert torch.equal(recorder[TAP], torch.eye(6).expand(2, 4, 6, 6))
    assert torch.equal(found, value)


HIDE = torch.tensor([[0, 1, 0, 0, 1, 0], [1, 0, 0, 0, 0, 1]], dtype=torch.bool)
"""True hides a key, by pair; other keys than those that MASK leaves to no row."""


@pytest.mark.parametrize("name", [name for name in CASES if "empty" not in name])
def test_hidden_keys_get_nothing_and_the_others_share_it(name):
    sizes, options = CASES[name]
    query, key, value = tensors(**sizes)
    recorder = Recorder()
    found = tapped(Fused(), query, key, value, take=recorder, edit=Edit(hidden=HIDE), **options)
    keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    plain = probabilities_of(query, keys, **{k: v for k, v in options.items() if k != "enable_gqa"})
    left = plain.masked_fill(HIDE[:, None, None], 0)
    seen = left.sum(-1) > 0  # of a causal mask the first row may look at a hidden key alone
    wanted = left / left.sum(-1, keepdim=True)
    assert torch.allclose(recorder[TAP][seen], wanted[seen], atol=1e-6)
    values = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    assert torch.allclose(found[seen], (wanted @ values)[seen], atol=1e-5)
    assert bool(seen.all()) == ("causal" not in name)


@pytest.mark.parametrize("softmax", SOFTMAX.values(), ids=SOFTMAX)
def test_hidden_keys_of_written_out_attention(softmax):
    inputs = tensors()
    recorder = Recorder()
    found = tapped(Explicit(softmax), *inputs, take=recorder, watched=EVERYTHING, edit=Edit(hidden=HIDE))
    assert not recorder[TAP].transpose(1, 3)[HIDE].any()
    assert torch.isneginf(recorder[SCORE_TAP].transpose(1, 3)[HIDE]).all()
    assert torch.allclose(found, Fused()(*inputs, attn_mask=~HIDE[:, None, None]), atol=1e-6)


def test_one_head_and_hidden_keys_go_together():
    inputs = tensors()
    found = tapped(Fused(), *inputs, take=Recorder(), edit=Edit("one_head", HIDE))
    wanted = Fused()(*[joined(each) for each in inputs], attn_mask=~HIDE[:, None, None])
    assert torch.allclose(found, split(wanted, 4), atol=1e-6)


@pytest.mark.parametrize("edit", [ONE_HEAD, IDENTITY, Edit(hidden=HIDE)], ids=["one head", "identity", "hidden"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_attention_that_is_computed_otherwise_keeps_its_precision(edit, dtype):
    inputs = [each.to(dtype) for each in tensors()]
    recorder = Recorder()
    found = tapped(Fused(), *inputs, take=recorder, edit=edit)
    assert {found.dtype, recorder[TAP].dtype} == {dtype}
    exact = tapped(Fused(), *[each.double() for each in inputs], take=Recorder(), edit=edit)
    assert torch.allclose(found.double(), exact, atol=1e-12 if dtype == torch.float64 else 0.05)


# ---------------------------------------------------------------- nn.MultiheadAttention

WIDTH, HEADS, QUERIES, KEYS, BATCH = 12, 3, 5, 6, 2
HIDDEN = torch.tensor([[0, 0, 1, 0, 0, 1], [1, 0, 0, 0, 1, 0]], dtype=torch.bool)  # True hides a key, by pair
MASK = ~BOOLEAN  # True hides a key, [queries, keys]


def by_head(mask):
    """A mask per pair and head, [B * H, queries, keys]."""
    each = [mask.roll(shift, -1) for shift in range(BATCH * HEADS)]
    return torch.stack(each)


MODULES = {
    "batch first": {"batch_first": True},
    "tokens first": {"batch_first": False},
    "no bias": {"batch_first": True, "bias": False},
    "other widths of keys and values": {"batch_first": True, "kdim": 7, "vdim": 10},
    "other widths, tokens first, no bias": {"batch_first": False, "kdim": 7, "vdim": 10, "bias": False},
    "one head": {"batch_first": True, "heads": 1},
}
MASKS = {
    "no mask": {},
    "bool mask": {"attn_mask": MASK},
    "float mask": {"attn_mask": ADDED},
    "bool mask by head": {"attn_mask": by_head(MASK)},
    "float mask by head": {"attn_mask": by_head(ADDED)},
    "hidden keys": {"key_padding_mask": HIDDEN},
    "weighed keys": {"key_padding_mask": torch.linspace(-1, 1, BATCH * KEYS).reshape(BATCH, KEYS)},
    "bool mask and hidden keys": {"attn_mask": MASK & ~MASK[:, :1], "key_padding_mask": HIDDEN & (torch.arange(6) > 2)},
    "float mask by head and weighed keys": {
        "attn_mask": by_head(ADDED),
        "key_padding_mask": torch.linspace(-1, 1, BATCH * KEYS).reshape(BATCH, KEYS),
    },
}
RETURNED = {
    "no weights": {"need_weights": False},
    "mean weights": {"need_weights": True, "average_attn_weights": True},
    "weights by head": {"need_weights": True, "average_attn_weights": False},
}


def multihead(*, heads=HEADS, dropout=0.0, **options):
    torch.manual_seed(7)
    module = nn.MultiheadAttention(WIDTH, heads, dropout=dropout, **options)
    for parameter in module.parameters():  # the biases would be zero, and hide what they do
        nn.init.normal_(parameter, std=0.4)
    return module.eval()


def sources(module, *, requires_grad=False):
    generator = torch.Generator().manual_seed(3)
    shapes = [(BATCH, QUERIES, WIDTH), (BATCH, KEYS, module.kdim), (BATCH, KEYS, module.vdim)]
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    made = made if module.batch_first else [each.transpose(0, 1).contiguous() for each in made]
    return [each.requires_grad_(requires_grad) for each in made]


def fitting(mask, heads):
    """Masks by head are for three heads."""
    return {k: v[:: HEADS // heads] if k == "attn_mask" and v.ndim == 3 else v for k, v in mask.items()}


def slow_multihead(module, query, key, value, attn_mask=None, key_padding_mask=None):
    """Scores and probabilities [B, H, Q, K] and joined heads [B, Q, D], head by head in float64."""
    if not module.batch_first:
        query, key, value = (each.transpose(0, 1) for each in (query, key, value))
    if module.in_proj_weight is None:
        weights = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    else:
        weights = module.in_proj_weight.split(WIDTH)
    biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.split(WIDTH)
    projected = []
    for source, weight, bias in zip((query, key, value), weights, biases, strict=True):
        made = source.detach().double().numpy() @ weight.detach().double().numpy().T
        projected.append(made if bias is None else made + bias.detach().double().numpy())
    q, k, v = projected
    heads, width = module.num_heads, WIDTH // module.num_heads
    scores = np.zeros((len(q), heads, q.shape[1], k.shape[1]))
    joined = np.zeros_like(q)
    for b, h in np.ndindex(len(q), heads):
        own = slice(h * width, (h + 1) * width)
        scores[b, h] = q[b, :, own] @ k[b, :, own].T / math.sqrt(width)
        for mask in (attn_mask, key_padding_mask):
            if mask is not None:
                place = b * heads + h if mask.ndim == 3 else ... if mask is attn_mask else b
                part = mask[place]
                scores[b, h] += np.where(part, -np.inf, 0) if mask.dtype == torch.bool else part.numpy()
        powers = np.exp(scores[b, h] - scores[b, h].max(-1, keepdims=True))
        joined[b, :, own] = powers / powers.sum(-1, keepdims=True) @ v[b, :, own]
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return scores, powers / powers.sum(-1, keepdims=True), joined


def same(found, wanted, tolerance=1e-6):
    if wanted is None or found is None:
        return found is wanted
    return found.shape == wanted.shape and torch.allclose(found, wanted, atol=tolerance)


@pytest.mark.parametrize("returned", RETURNED.values(), ids=RETURNED)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("options", MODULES.values(), ids=MODULES)
def test_multihead_attention_gives_what_it_gives_unwatched(options, mask, returned):
    module = multihead(**options)
    inputs, mask = sources(module), fitting(mask, module.num_heads)
    recorder = Recorder()
    found = tapped(module, *inputs, take=recorder, watched=EVERYTHING, **mask, **returned)
    wanted = module(*inputs, **mask, **returned)
    assert all(same(one, other) for one, other in zip(found, wanted, strict=True))
    assert [tap for tap, _ in recorder.seen] == [SCORE_TAP, TAP, HEADS_TAP]


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("options", MODULES.values(), ids=MODULES)
def test_inside_multihead_attention_are_the_reference_scores_probabilities_and_heads(options, mask):
    module = multihead(**options)
    inputs, mask = sources(module), fitting(mask, module.num_heads)
    recorder = Recorder()
    tapped(module, *inputs, take=recorder, watched=EVERYTHING, **mask)
    scores, attention, joined = slow_multihead(module, *inputs, **mask)
    assert recorder[TAP].shape == (BATCH, module.num_heads, QUERIES, KEYS)
    assert torch.allclose(recorder[TAP].sum(-1), torch.ones(()), atol=1e-6)
    assert np.allclose(recorder[SCORE_TAP].detach(), scores, atol=1e-5)
    assert np.allclose(recorder[TAP].detach(), attention, atol=1e-6)
    assert np.allclose(recorder[HEADS_TAP].detach(), joined, atol=1e-5)


@pytest.mark.parametrize("options", MODULES.values(), ids=MODULES)
def test_the_heads_are_what_the_output_projection_takes(options):
    module = multihead(**options)
    inputs = sources(module)
    recorder = Recorder()
    output, _ = tapped(module, *inputs, take=recorder, watched=EVERYTHING)
    projected = module.out_proj(recorder[HEADS_TAP])
    assert torch.allclose(output if module.batch_first else output.transpose(0, 1), projected, atol=1e-6)


@pytest.mark.parametrize("mask", [{}, {"attn_mask": MASK}, {"attn_mask": by_head(ADDED)[:HEADS]}], ids=str)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("returned", RETURNED.values(), ids=RETURNED)
@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention_without_a_batch(batch_first, returned, padded, mask):
    module = multihead(batch_first=batch_first)
    inputs = [each[0] if batch_first else each[:, 0] for each in sources(module)]
    if padded and mask.get("attn_mask", MASK).dtype != torch.bool:
        mask = mask | {"key_padding_mask": torch.linspace(-1, 1, KEYS)}
    elif padded:
        mask = mask | {"key_padding_mask": HIDDEN[0] & (torch.arange(KEYS) > 2)}
    recorder = Recorder()
    found = tapped(module, *inputs, take=recorder, watched=EVERYTHING, **mask, **returned)
    assert all(same(one, other) for one, other in zip(found, module(*inputs, **mask, **returned), strict=True))
    assert recorder[TAP].shape == (1, HEADS, QUERIES, KEYS)
    assert recorder[HEADS_TAP].shape == (1, QUERIES, WIDTH)


@pytest.mark.parametrize("returned", RETURNED.values(), ids=RETURNED)
@pytest.mark.parametrize(
    "mask", [{}, {"attn_mask": MASK}, {"key_padding_mask": HIDDEN}], ids=["none", "2-D", "padding"]
)
@pytest.mark.parametrize("options", MODULES.values(), ids=MODULES)
def test_gradients_pass_multihead_attention_as_unwatched(options, mask, returned):
    module = multihead(**options)
    inputs = sources(module, requires_grad=True)
    wanted_of = [*inputs, *module.parameters()]
    found, wanted = (
        torch.autograd.grad(output.square().sum(), wanted_of)
        for output in (
            tapped(module, *inputs, take=Recorder(), watched=EVERYTHING, **mask, **returned)[0],
            module(*inputs, **mask, **returned)[0],
        )
    )
    assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-4) for one, other in zip(found, wanted, strict=True))


def test_the_gradient_at_the_probabilities_of_multihead_attention():
    module = multihead(batch_first=True)
    inputs = sources(module)
    recorder = Recorder()
    output, _ = tapped(module, *inputs, take=recorder, watched=EVERYTHING)
    at_attention, at_heads = torch.autograd.grad(output.square().sum(), [recorder[TAP], recorder[HEADS_TAP]])
    values = functional.linear(inputs[2], module.in_proj_weight[2 * WIDTH :], module.in_proj_bias[2 * WIDTH :])
    values = values.unflatten(-1, (HEADS, -1))
    by_heads = at_heads.unflatten(-1, (HEADS, -1))
    assert torch.allclose(at_attention, torch.einsum("bthd,bjhd->bhtj", by_heads, values), atol=1e-4)


@pytest.mark.parametrize(
    ("tap", "wanted"),
    [
        (TAP, lambda module, joined: module.out_proj(2 * joined)),
        (HEADS_TAP, lambda module, joined: module.out_proj(2 * joined)),
    ],
    ids=["attention", "heads"],
)
def test_multihead_attention_computes_on_with_what_take_returns(tap, wanted):
    module = multihead(batch_first=True)
    inputs = sources(module)
    recorder = Recorder()
    tapped(module, *inputs, take=recorder, watched=EVERYTHING)
    found, _ = tapped(module, *inputs, take=lambda seen, t: 2 * t if seen == tap else t, watched=EVERYTHING)
    assert torch.allclose(found, wanted(module, recorder[HEADS_TAP]), atol=1e-6)


def test_multihead_attention_computes_on_with_the_scores_that_take_returns():
    module = multihead(batch_first=True)
    inputs = sources(module)
    _, weights = tapped(
        module, *inputs, take=lambda tap, t: torch.zeros_like(t) if tap == SCORE_TAP else t, watched=EVERYTHING
    )
    assert torch.allclose(weights, torch.full((BATCH, QUERIES, KEYS), 1 / KEYS), atol=1e-6)


@pytest.mark.parametrize("returned", RETURNED.values(), ids=RETURNED)
def test_dropout_in_training_falls_on_what_follows_the_probabilities(returned):
    module = multihead(batch_first=True, dropout=0.4).train()
    inputs = sources(module)
    recorder = Recorder()
    torch.manual_seed(11)
    found = tapped(module, *inputs, take=recorder, watched=EVERYTHING, **returned)
    assert torch.allclose(recorder[TAP].sum(-1), torch.ones(()), atol=1e-6)
    plain = module.eval()(*inputs)[0]
    assert not torch.allclose(found[0], plain, atol=1e-3)
    if returned["need_weights"]:  # the fused kernel draws its own numbers
        torch.manual_seed(11)
        wanted = module.train()(*inputs, **returned)
        assert all(same(one, other) for one, other in zip(found, wanted, strict=True))


def test_dropout_is_off_in_evaluation():
    module = multihead(batch_first=True, dropout=0.4)
    inputs = sources(module)
    assert same(tapped(module, *inputs, take=Recorder())[0], module(*inputs)[0])


@pytest.mark.parametrize("need_weights", [True, False])
def test_a_causal_hint_goes_with_its_mask(need_weights):
    module = multihead(batch_first=True)
    inputs = [source[:, :QUERIES] for source in sources(module)]
    options = {
        "attn_mask": nn.Transformer.generate_square_subsequent_mask(QUERIES),
        "is_causal": True,
        "need_weights": need_weights,
    }
    recorder = Recorder()
    found = tapped(module, *inputs, take=recorder, **options)
    assert all(same(one, other) for one, other in zip(found, module(*inputs, **options), strict=True))
    assert not recorder[TAP].triu(1).any()


@pytest.mark.parametrize("need_weights", [True, False])
def test_a_row_of_multihead_attention_that_may_look_nowhere(need_weights):
    """NaN where the module writes its softmax out, zeros where the fused kernel runs: as unwatched."""
    module = multihead(batch_first=True)
    inputs = sources(module)
    mask = MASK.clone().index_fill(0, torch.tensor([2]), value=True)
    found = tapped(module, *inputs, take=Recorder(), attn_mask=mask, need_weights=need_weights)[0]
    wanted = module(*inputs, attn_mask=mask, need_weights=need_weights)[0]
    assert torch.allclose(found, wanted, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
@pytest.mark.parametrize("gradients", [True, False])
def test_keys_that_are_no_tokens_are_refused(options, gradients):
    module = multihead(batch_first=True, **options)
    with torch.set_grad_enabled(gradients), pytest.raises(CaptureError, match=r"^CROSS of fusion block 0: .*bias_k"):
        tapped(module, *sources(module), take=Recorder())


@pytest.mark.parametrize("given", ["static_k", "static_v"])
def test_static_keys_are_refused(given):
    module = multihead(batch_first=False)
    query, key, value = sources(module)
    static = torch.zeros(BATCH * HEADS, KEYS, WIDTH // HEADS)

    def call():
        return functional.multi_head_attention_forward(
            *(query, key, value, WIDTH, HEADS, module.in_proj_weight, module.in_proj_bias, None, None, False, 0.0),
            *(module.out_proj.weight, module.out_proj.bias),
            **{given: static},
        )

    with pytest.raises(CaptureError, match="static keys"):
        tapped(call, take=Recorder())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_multihead_attention_keeps_its_precision(dtype):
    module = multihead(batch_first=True).to(dtype)
    inputs = [source.to(dtype) for source in sources(module)]
    recorder = Recorder()
    found = tapped(module, *inputs, take=recorder, watched=EVERYTHING)[0]
    assert {found.dtype, *(tensor.dtype for _, tensor in recorder.seen)} == {dtype}
    assert torch.allclose(found, module(*inputs)[0], atol=1e-12 if dtype == torch.float64 else 0.05)


# ---------------------------------------------------------------- nn.MultiheadAttention, computed otherwise


def projections(module, *inputs):
    """Queries, keys and values [B, N, D]."""
    inputs = inputs if module.batch_first else [each.transpose(0, 1) for each in inputs]
    if module.in_proj_weight is None:
        weights = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    else:
        weights = module.in_proj_weight.split(WIDTH)
    biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.split(WIDTH)
    return [functional.linear(*each) for each in zip(inputs, weights, biases, strict=True)]


@pytest.mark.parametrize("options", MODULES.values(), ids=MODULES)
def test_queries_keys_and_values_of_multihead_attention_are_its_projections_by_head(options):
    module = multihead(**options)
    inputs = sources(module)
    recorder = Recorder()
    tapped(module, *inputs, take=recorder, watched=EVERYTHING | MIXED)
    for tap, whole in zip((QUERY_TAP, KEY_TAP, VALUE_TAP), projections(module, *inputs), strict=True):
        assert torch.allclose(recorder[tap], whole.unflatten(-1, (module.num_heads, -1)).transpose(1, 2), atol=1e-6)


def same_for_all_heads(mask):
    """A mask by pair and head [B * H, queries, keys] whose heads are alike."""
    if "attn_mask" not in mask or mask["attn_mask"].ndim == 2:
        return mask
    return mask | {"attn_mask": mask["attn_mask"][::HEADS].repeat_interleave(HEADS, 0)}


@pytest.mark.parametrize("returned", RETURNED.values(), ids=RETURNED)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("options", [v for k, v in MODULES.items() if k != "one head"], ids=lambda o: str(list(o)))
def test_one_head_of_multihead_attention_is_the_module_with_one_head(options, mask, returned):
    module, twin = multihead(**options), multihead(**options, heads=1)  # the weights are the same
    inputs, mask = sources(module), same_for_all_heads(mask)
    recorder = Recorder()
    found = tapped(module, *inputs, take=recorder, watched=EVERYTHING | MIXED, edit=ONE_HEAD, **mask, **returned)
    wanted = twin(*inputs, **fitting(mask, 1), **returned)
    assert all(same(one, other) for one, other in zip(found, wanted, strict=True))
    assert recorder[TAP].shape == (BATCH, 1, QUERIES, KEYS)
    assert recorder[VALUE_TAP].shape == (BATCH, 1, KEYS, WIDTH)
    assert recorder[HEADS_TAP].shape == (BATCH, QUERIES, WIDTH)


def test_gradients_pass_through_one_head_of_multihead_attention():
    module, twin = multihead(batch_first=True), multihead(batch_first=True, heads=1)
    inputs = sources(module, requires_grad=True)
    outputs = tapped(module, *inputs, take=Recorder(), edit=ONE_HEAD)[0], twin(*inputs)[0]
    gradients = [torch.autograd.grad(output.square().sum(), inputs) for output in outputs]
    assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-4) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask", [MASK, ADDED], ids=["bool", "float"])
def test_heads_of_multihead_attention_that_each_have_a_mask_cannot_be_joined(mask, batch_first):
    module = multihead(batch_first=batch_first)
    with pytest.raises(CaptureError, match="attention='one_head'"):
        tapped(module, *sources(module), take=Recorder(), edit=ONE_HEAD, attn_mask=by_head(mask))


@pytest.mark.parametrize("returned", RETURNED.values(), ids=RETURNED)
@pytest.mark.parametrize("options", MODULES.values(), ids=MODULES)
def test_identity_of_multihead_attention_projects_every_tokens_own_value(options, returned):
    module = multihead(**options)
    inputs = [each[:, :QUERIES] if module.batch_first else each[:QUERIES] for each in sources(module)]
    recorder = Recorder()
    output, weights = tapped(module, *inputs, take=recorder, watched=EVERYTHING, edit=IDENTITY, **returned)
    assert torch.equal(recorder[TAP], torch.eye(QUERIES).expand(BATCH, module.num_heads, QUERIES, QUERIES))
    value = projections(module, *inputs)[2]
    assert torch.allclose(recorder[HEADS_TAP], value, atol=1e-6)
    projected = module.out_proj(value)
    assert torch.allclose(output if module.batch_first else output.transpose(0, 1), projected, atol=1e-6)
    if weights is not None:
        assert torch.equal(weights, torch.eye(QUERIES).expand_as(weights))


@pytest.mark.parametrize("edit", [Edit(hidden=HIDDEN), Edit("one_head", HIDDEN)], ids=["own heads", "one head"])
@pytest.mark.parametrize("returned", RETURNED.values(), ids=RETURNED)
@pytest.mark.parametrize("mask", [{}, {"attn_mask": ADDED}], ids=["no mask", "float mask"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_hidden_keys_of_multihead_attention_are_as_padding(batch_first, mask, returned, edit):
    module = multihead(batch_first=batch_first)
    twin = multihead(batch_first=batch_first, heads=1) if edit.form == "one_head" else module
    inputs = sources(module)
    recorder = Recorder()
    found = tapped(module, *inputs, take=recorder, watched=EVERYTHING, edit=edit, **mask, **returned)
    padding = HIDDEN if not mask else torch.zeros(HIDDEN.shape).masked_fill(HIDDEN, -math.inf)
    wanted = twin(*inputs, key_padding_mask=padding, **mask, **returned)
    assert all(same(one, other) for one, other in zip(found, wanted, strict=True))
    assert not recorder[TAP].transpose(1, 3)[HIDDEN].any()


# ---------------------------------------------------------------- through the engine's hooks

ENCODER_TAPS = {"attention": Tap("vision", 0, "F2"), "scores": Tap("vision", 0, SCORES)}


def encoder(*, norm_first, activation="gelu"):
    torch.manual_seed(5)
    return nn.TransformerEncoderLayer(
        WIDTH, HEADS, 20, dropout=0.1, activation=activation, batch_first=True, norm_first=norm_first
    ).eval()


def readings(layer, *inside):
    taps = ENCODER_TAPS | {"heads": Tap("vision", 0, "F3_HEADS")}
    return {taps[how]: Reading(layer.self_attn, how) for how in inside}


@pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference"])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_the_fast_path_of_an_encoder_layer_gives_its_attention_by_head(norm_first, activation, quiet):
    layer = encoder(norm_first=norm_first, activation=activation)
    tokens = torch.randn(BATCH, KEYS, WIDTH, generator=torch.Generator().manual_seed(1))
    with quiet():
        plain = layer(tokens)
        with Taps(readings(layer, "attention", "scores", "heads"), differentiate=False) as taps:
            found = layer(tokens)
        after = layer(tokens)
    assert torch.allclose(found, plain, atol=1e-6)
    assert torch.equal(after, plain)
    before = layer.norm1(tokens) if norm_first else tokens
    scores, attention, joined = slow_multihead(layer.self_attn, before, before, before)
    assert np.allclose(taps.tensors[ENCODER_TAPS["scores"]], scores, atol=1e-5)
    assert np.allclose(taps.tensors[ENCODER_TAPS["attention"]], attention, atol=1e-6)
    assert np.allclose(taps.tensors[Tap("vision", 0, "F3_HEADS")], joined, atol=1e-5)


@pytest.mark.parametrize("norm_first", [True, False])
def test_the_graph_of_an_encoder_layer_begins_at_its_scores(norm_first):
    layer = encoder(norm_first=norm_first).requires_grad_(requires_grad=False)
    tokens = torch.randn(BATCH, KEYS, WIDTH, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), Taps(readings(layer, "attention", "scores"), differentiate=True) as taps:
        output = layer(tokens)
    assert torch.allclose(output, layer(tokens), atol=1e-6)
    scores, attention = (taps.tensors[ENCODER_TAPS[how]] for how in ("scores", "attention"))
    at_scores, at_attention = torch.autograd.grad(output.square().sum(), [scores, attention])
    through = attention * (at_attention - (at_attention * attention).sum(-1, keepdim=True))
    assert torch.allclose(at_scores, through, atol=1e-6)
    assert at_attention.abs().max() > 0


def test_an_encoder_layer_is_left_without_hooks():
    layer = encoder(norm_first=True)
    with Taps(readings(layer, "attention"), differentiate=False):
        layer(torch.zeros(1, KEYS, WIDTH))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in layer.modules())


def test_attention_by_head_of_a_module_that_runs_twice_is_refused():
    layer = encoder(norm_first=True)
    with (
        pytest.raises(CaptureError, match="reached twice"),
        Taps(readings(layer, "attention"), differentiate=False),
        torch.no_grad(),
    ):
        layer(layer(torch.zeros(1, KEYS, WIDTH)))


def as_one_head(layer):
    """The same layer with one head."""
    made = nn.TransformerEncoderLayer(WIDTH, 1, 20, dropout=0.1, activation="gelu", batch_first=True, norm_first=True)
    made.load_state_dict(layer.state_dict())
    return made.eval()


@pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_module_is_edited_without_a_tap_and_only_inside_the_context(quiet):
    layer = encoder(norm_first=True)
    tokens = torch.randn(BATCH, KEYS, WIDTH, generator=torch.Generator().manual_seed(1))
    with quiet():
        plain, wanted = layer(tokens), as_one_head(layer)(tokens)
        with Taps({}, differentiate=False, edits={layer.self_attn: ONE_HEAD}):
            found = layer(tokens)
        after = layer(tokens)
    assert torch.allclose(found, wanted, atol=1e-6)
    assert not torch.allclose(found, plain, atol=1e-3)
    assert torch.equal(after, plain)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in layer.modules())


def test_what_is_tapped_in_an_edited_module_is_what_it_computes():
    layer = encoder(norm_first=True)
    tokens = torch.randn(BATCH, KEYS, WIDTH, generator=torch.Generator().manual_seed(1))
    with (
        torch.no_grad(),
        Taps(readings(layer, "attention"), differentiate=False, edits={layer.self_attn: IDENTITY}) as taps,
    ):
        layer(tokens)
    assert torch.equal(taps.tensors[ENCODER_TAPS["attention"]], torch.eye(KEYS).expand(BATCH, HEADS, KEYS, KEYS))


def test_an_edit_is_of_its_own_module_alone():
    edited, tapped_ = encoder(norm_first=True), encoder(norm_first=False)
    tokens = torch.randn(BATCH, KEYS, WIDTH, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = tapped_(as_one_head(edited)(tokens))
        with Taps(readings(tapped_, "attention"), differentiate=False, edits={edited.self_attn: ONE_HEAD}) as taps:
            found = tapped_(edited(tokens))
    assert torch.allclose(found, wanted, atol=1e-6)
    assert taps.tensors[ENCODER_TAPS["attention"]].shape == (BATCH, HEADS, KEYS, KEYS)


def test_an_edit_does_not_reach_another_thread():
    layer = encoder(norm_first=True)
    tokens = torch.randn(BATCH, KEYS, WIDTH, generator=torch.Generator().manual_seed(1))
    plain = layer(tokens)
    with Taps({}, differentiate=False, edits={layer.self_attn: ONE_HEAD}), ThreadPoolExecutor(1) as pool:
        found = pool.submit(layer, tokens).result()
    assert torch.allclose(found, plain, atol=1e-6)
