"""The explained scalar: which class is meant, and how it is read from a head, derived again in float64."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch

from vlcam.catalogue import recipes
from vlcam.choices import SCALES
from vlcam.errors import InputError, RecipeError, UnknownNameError
from vlcam.questions import Asked, class_index, read_target
from vlcam.readers import explained_classes
from vlcam.scores import Score, Scores
from vlcam.targets import Class, Custom, resolve

CLASSES = {"class": "classes"}
MATCHING = {"itm": "binary", "contrastive": "cosine"}
BOTH = CLASSES | MATCHING
LABELS = ("tabby, tabby cat", "Tiger", "tiger", "Egyptian cat", "puma, cougar, Tabby", "dog", "dog", "Panda Bear")
OF_CLASS = recipes()["pgc-gradcam"].recipe
OF_MATCH = recipes()["lavis-itm"].recipe
LOGITS = torch.tensor([[0.3, -1.2, 2.0, 1.9, 0.1, -3.0], [1.0, 0.5, -0.5, 0.25, 4.0, 3.0]], dtype=torch.float64)


def reading(scale, classes=(None,), heads=CLASSES, recipe=OF_CLASS):
    return resolve(recipe.replace(scale=scale), heads, classes=classes).read


def softmax(logits):
    powers = [math.exp(z - max(logits)) for z in logits]
    return [power / sum(powers) for power in powers]


def slow_score(scale, logits, k):
    """One pair's score of class k, from the definitions."""
    others = [z for index, z in enumerate(logits) if index != k]
    chances = softmax(logits) if others else [1 / (1 + math.exp(-logits[0]))]
    if scale == "finer":
        near = sorted((i for i in range(len(logits)) if i != k), key=lambda i: abs(logits[i] - logits[k]))[:3]
        total = sum(chances[r] for r in near)
        return sum(chances[r] * (logits[k] - logits[r]) for r in near) / (total + 1e-9)
    return {
        "logit": logits[k],
        "probability": chances[k],
        "log-probability": math.log(chances[k]),
        "margin": logits[k] - max(others) if others else logits[k],
    }[scale]


def slow_gradient(scale, logits, k, step=1e-6):
    """Central differences."""
    found = []
    for i in range(len(logits)):
        up, down = list(logits), list(logits)
        up[i] += step
        down[i] -= step
        found.append((slow_score(scale, up, k) - slow_score(scale, down, k)) / (2 * step))
    return found


# ---------------------------------------------------------------- scores of a class


@pytest.mark.parametrize("width", [2, 3, 4, 6])
@pytest.mark.parametrize("k", [0, 1])
@pytest.mark.parametrize("scale", SCALES["class"])
def test_scores_of_a_class_and_their_gradients_follow_the_definitions(scale, k, width):
    logits = LOGITS[:, :width].clone().requires_grad_()
    found = reading(scale, (k,))(logits)
    assert found.dtype == torch.float64
    assert np.allclose(found.detach(), [slow_score(scale, row, k) for row in LOGITS[:, :width].tolist()], atol=1e-12)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    wanted = [slow_gradient(scale, row, k) for row in LOGITS[:, :width].tolist()]
    assert np.allclose(gradient, wanted, atol=1e-8)


@pytest.mark.parametrize("scale", SCALES["class"])
def test_every_pair_has_its_class(scale):
    found = reading(scale, (3, 5))(LOGITS)
    wanted = [slow_score(scale, LOGITS[0].tolist(), 3), slow_score(scale, LOGITS[1].tolist(), 5)]
    assert np.allclose(found, wanted, atol=1e-12)


@pytest.mark.parametrize("scale", SCALES["class"])
def test_without_a_class_it_is_the_one_with_the_highest_logit(scale):
    assert torch.equal(reading(scale)(LOGITS), reading(scale, (2, 4))(LOGITS))
    assert torch.equal(reading(scale, (None, 5))(LOGITS), reading(scale, (2, 5))(LOGITS))


@pytest.mark.parametrize("scale", [s for s in SCALES["class"] if s != "finer"])
def test_a_lone_logit_is_compared_with_zero(scale):
    logits = torch.tensor([[0.7], [-2.0]], dtype=torch.float64, requires_grad=True)
    found = reading(scale, (0,))(logits)
    assert np.allclose(found.detach(), [slow_score(scale, [z], 0) for z in (0.7, -2.0)], atol=1e-12)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    assert np.allclose(gradient, [slow_gradient(scale, [z], 0) for z in (0.7, -2.0)], atol=1e-8)


def test_a_lone_logit_has_no_neighbours():
    with pytest.raises(RecipeError, match="scale='finer' needs classes to compare with, and this model has one; use"):
        reading("finer", (0,))(torch.zeros(1, 1))


def test_the_gradient_of_finer_passes_through_its_probabilities():
    """With weights taken as constants the gradient is another; the far classes have one through the softmax's sum only.

    That sum cancels between numerator and denominator, but for the 1e-9.
    """
    row, k = LOGITS[0].tolist(), 2
    logits = LOGITS[:1].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(reading("finer", (k,))(logits).sum(), logits)
    near = [3, 0, 4]
    chances = softmax(row)
    shares = [chances[r] / sum(chances[r] for r in near) for r in near]
    detached = [0.0] * 6
    detached[k] = 1.0
    for r, share in zip(near, shares, strict=True):
        detached[r] = -share
    mean = sum(share * row[r] for r, share in zip(near, shares, strict=True))
    through = list(detached)
    for r, share in zip(near, shares, strict=True):
        through[r] -= share * (row[r] - mean)
    assert np.allclose(gradient[0], through, atol=1e-7)
    assert np.abs(gradient[0].numpy() - detached).max() > 0.05


def test_finer_of_two_classes_is_the_margin():
    logits = LOGITS[:, :2]
    assert torch.allclose(reading("finer", (0,))(logits), reading("margin", (0,))(logits), atol=1e-8)


def test_finer_never_compares_a_class_with_itself_where_others_tie():
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0, -5.0], [2.0, 2.0, 0.0, 4.0, 9.0]], dtype=torch.float64)
    found = reading("finer", (1,))(logits)
    # The tied others give zero; of the second row's, one ties and two lie 2 away on both sides.
    assert np.allclose(found, [0.0, slow_score("finer", logits[1].tolist(), 1)], atol=1e-12)
    assert torch.isfinite(torch.func.jacrev(reading("finer", (1,)))(logits)).all()


@pytest.mark.parametrize("scale", SCALES["class"])
@pytest.mark.parametrize("k", [0, 1, 2, 4])
def test_saturated_logits_give_finite_scores_and_gradients(scale, k):
    logits = (1e3 * LOGITS.float()).requires_grad_()
    found = reading(scale, (k,))(logits)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    assert torch.isfinite(found).all()
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("scale", ["logit", "log-probability", "margin"])
def test_saturated_losers_keep_their_gradient(scale):
    """A plain softmax would round to zero, and its logarithm would have none."""
    logits = (1e3 * LOGITS.float()).requires_grad_()
    (gradient,) = torch.autograd.grad(reading(scale, (1,))(logits).sum(), logits)
    assert torch.allclose(gradient[:, 1], torch.ones(2))


def test_a_sure_winners_probability_keeps_a_gradient_that_a_softmax_rounds_away():
    logits = torch.tensor([[0.0, 30.0, 1.0]], requires_grad=True)
    (gradient,) = torch.autograd.grad(reading("probability", (1,))(logits).sum(), logits)
    (rounded,) = torch.autograd.grad(logits.softmax(1)[:, 1].sum(), logits)
    wanted = math.exp(-30) + math.exp(-29)
    assert math.isclose(float(gradient[0, 1]), wanted, rel_tol=1e-5)
    assert rounded[0, 1] == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", SCALES["class"])
def test_half_precision_logits_are_read_in_single(scale, dtype):
    logits = LOGITS.to(dtype)
    found = reading(scale, (3,))(logits)
    assert found.dtype == torch.float32
    assert np.allclose(found, [slow_score(scale, row, 3) for row in logits.double().tolist()], atol=1e-5)


@pytest.mark.parametrize("scale", SCALES["class"])
def test_pairs_do_not_influence_each_other(scale):
    jacobian = torch.func.jacrev(reading(scale, (1, 4)))(LOGITS)
    assert torch.equal(jacobian[0, 1], torch.zeros(6, dtype=torch.float64))
    assert torch.equal(jacobian[1, 0], torch.zeros(6, dtype=torch.float64))


@pytest.mark.parametrize("scale", SCALES["class"])
def test_logits_are_left_alone(scale):
    logits = LOGITS.clone()
    reading(scale, (1, 4))(logits)
    assert torch.equal(logits, LOGITS)


# ---------------------------------------------------------------- scores of a match


@pytest.mark.parametrize("scale", SCALES["itm"])
def test_scores_of_a_match_are_those_of_class_one_of_two(scale):
    logits = LOGITS[:, :2].clone().requires_grad_()
    found = reading(scale, heads=MATCHING, recipe=OF_MATCH)(logits)
    assert np.allclose(found.detach(), [slow_score(scale, row, 1) for row in LOGITS[:, :2].tolist()], atol=1e-12)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    assert np.allclose(gradient, [slow_gradient(scale, row, 1) for row in LOGITS[:, :2].tolist()], atol=1e-8)


def test_a_cosine_is_read_as_it_is():
    values = torch.tensor([0.25, -1.0], dtype=torch.float64)
    assert torch.equal(resolve(OF_MATCH.replace(target="contrastive", scale="cosine"), MATCHING).read(values), values)


@pytest.mark.parametrize("scale", [s for s in SCALES["contrastive"] if s != "cosine"])
def test_a_similarity_without_logits_has_no_other_scale(scale):
    with pytest.raises(RecipeError, match=rf"^scale='{scale}' with target='contrastive': .* on the scale 'cosine'$"):
        resolve(OF_MATCH.replace(target="contrastive", scale=scale), MATCHING)


# ---------------------------------------------------------------- scores of one text among several

OF_TEXT = recipes()["clip-gradcam"].recipe
COSINES = torch.tensor([[0.3, -0.2, 0.9, 0.1, 0.5], [-0.6, 0.4, 0.2, 0.8, 0.0]], dtype=torch.float64)
SIMILAR = torch.stack((COSINES, 3 * COSINES - 0.7), -1)
"""Cosines and logits, as of a model of scale 3 and bias -0.7."""
ALL = torch.ones(2, 5, dtype=torch.bool)
SOME = torch.tensor([[1, 0, 1, 1, 0], [1, 1, 0, 1, 1]], dtype=torch.bool)
"""Which texts each pair's own, the third and the second, is compared with."""


def of_text(scale, kind, taking=None):
    target = resolve(OF_TEXT.replace(scale=scale), {"contrastive": kind}, classes=(2, 1))
    return target.read if taking is None else target.within(taking).read


def slow_similarity(scale, kind, cosines, own, taken):
    """One pair's score of its own text among those that are taken, from the definitions."""
    logits = [3 * c - 0.7 for c in cosines]
    place = taken.index(own)
    if scale == "cosine":
        return cosines[own]
    if scale == "difference":
        others = [cosines[t] for t in taken if t != own]
        return cosines[own] - sum(others) / len(others)
    if kind == "sigmoid" and scale in ("probability", "log-probability"):
        chance = 1 / (1 + math.exp(-logits[own]))
        return chance if scale == "probability" else math.log(chance)
    return slow_score(scale, [logits[t] for t in taken], place)


@pytest.mark.parametrize("taking", [None, ALL, SOME], ids=["default", "all", "some"])
@pytest.mark.parametrize("kind", ["prompts", "sigmoid"])
@pytest.mark.parametrize("scale", SCALES["contrastive"])
def test_scores_of_a_text_among_several_and_their_gradients_follow_the_definitions(scale, kind, taking):
    output = SIMILAR.clone().requires_grad_()
    found = of_text(scale, kind, taking)(output)
    assert found.dtype == torch.float64
    rows = ALL if taking is None else taking
    wanted, slopes = [], np.zeros((2, 5))
    for pair, own in enumerate((2, 1)):
        taken = [t for t in range(5) if rows[pair, t]]

        def score(cosines, own=own, taken=taken):
            return slow_similarity(scale, kind, cosines, own, taken)

        cosines = COSINES[pair].tolist()
        wanted.append(score(cosines))
        for t in range(5):
            up, down = list(cosines), list(cosines)
            up[t], down[t] = up[t] + 1e-6, down[t] - 1e-6
            slopes[pair, t] = (score(up) - score(down)) / 2e-6
    assert np.allclose(found.detach(), wanted, atol=1e-12)
    (gradient,) = torch.autograd.grad(found.sum(), output)
    assert torch.isfinite(gradient).all()
    assert np.allclose(gradient[..., 0] + 3 * gradient[..., 1], slopes, atol=1e-8)


@pytest.mark.parametrize("scale", ["cosine", "logit"])
@pytest.mark.parametrize("kind", ["prompts", "sigmoid"])
def test_a_plain_score_of_a_text_does_not_depend_on_the_others(kind, scale):
    assert torch.equal(of_text(scale, kind)(SIMILAR), of_text(scale, kind, SOME)(SIMILAR))


@pytest.mark.parametrize("kind", ["prompts", "sigmoid"])
def test_a_target_says_whether_it_compares_texts(kind):
    comparing = {s for s in SCALES["contrastive"] if resolve(OF_TEXT.replace(scale=s), {"contrastive": kind}).compares}
    softmaxed = {"probability", "log-probability"} if kind == "prompts" else set()
    assert comparing == {"margin", "difference", "finer"} | softmaxed


def test_a_score_of_a_sure_model_keeps_its_gradient_as_a_log_probability():
    output = torch.stack((COSINES, 400 * COSINES), -1).requires_grad_()
    (gradient,) = torch.autograd.grad(of_text("log-probability", "prompts")(output).sum(), output)
    assert gradient[0, 2, 1] > 0


def test_a_caption_is_the_sum_of_its_tokens():
    words = torch.tensor([[-0.5, -2.0, 0.0], [-1.0, -0.25, -4.0]], dtype=torch.float64)
    recipe = recipes()["coca-caption"].recipe
    target = resolve(recipe, {"caption": "tokens"})
    assert target.label == "caption_log_probability"
    assert np.allclose(target.read(words), [-2.5, -5.25], atol=1e-15)


# ---------------------------------------------------------------- which class


@pytest.mark.parametrize(
    ("which", "index"),
    [
        (0, 0),
        (7, 7),
        (np.int64(3), 3),
        (np.uint8(3), 3),
        (torch.tensor(3), 3),
        ("tabby, tabby cat", 0),
        ("Tiger", 1),  # as it stands, before any other rule
        ("tiger", 2),
        ("egyptian CAT", 3),
        ("tabby cat", 0),
        ("Cougar", 4),
        ("PUMA", 4),
        ("puma, cougar, tabby", 4),
        ("panda bear", 7),
        (np.str_("Egyptian cat"), 3),
    ],
)
def test_a_class_is_found_by_index_and_by_label(which, index):
    assert class_index(which, LABELS) == index
    assert type(class_index(which, LABELS)) is int


@pytest.mark.parametrize(
    ("which", "classes"),
    [("TIGER", r"\[1, 2\]"), ("dog", r"\[5, 6\]"), ("Dog", r"\[5, 6\]"), ("tabby", r"\[0, 4\]")],
)
def test_a_label_of_several_classes_is_refused_with_their_indices(which, classes):
    with pytest.raises(UnknownNameError, match=rf"^class '{which}': classes {classes} have that name; give the index$"):
        class_index(which, LABELS)


@pytest.mark.parametrize(
    ("which", "message"),
    [
        (-1, r"^no class -1; the model has classes 0 to 7$"),
        (8, r"^no class 8; the model has classes 0 to 7$"),
        ("egyptian dog", r"^no class 'egyptian dog'; close to it: 'Egyptian cat'"),
        ("zzzzzz", r"^no class 'zzzzzz'; close to it: 'tabby, tabby cat', 'Tiger', 'tiger', 'Egyptian cat', 'puma, "),
        ("bear", r"^no class 'bear'; close to it: "),  # part of a word is no name
        ("3", r"^no class '3'; close to it"),
    ],
)
def test_a_class_that_does_not_exist_is_refused_with_those_that_do(which, message):
    with pytest.raises(UnknownNameError, match=message):
        class_index(which, LABELS)


def test_without_labels_an_index_is_taken_and_a_label_refused():
    assert class_index(4711, ()) == 4711
    with pytest.raises(UnknownNameError, match=r"^no class -1$"):
        class_index(-1, ())
    with pytest.raises(UnknownNameError, match=r"^no class 'cat'; the model's classes have no names; give the index$"):
        class_index("cat", ())


@pytest.mark.parametrize("which", [True, False, 1.0, np.float32(2), None, [1], torch.tensor([1, 2]), 1j], ids=repr)
def test_what_is_neither_a_whole_number_nor_a_label_is_refused(which):
    with pytest.raises(RecipeError, match="give a whole number or a label"):
        class_index(which, LABELS)


# ---------------------------------------------------------------- what a user gives


def double(output):
    return 2 * output[:, 0]


class Callable:
    def __call__(self, output):
        return output[:, 0]


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        (None, Asked({})),
        (5, Asked({"target": "class"}, classes=(5,))),
        (0, Asked({"target": "class"}, classes=(0,))),
        (np.int64(5), Asked({"target": "class"}, classes=(5,))),
        (torch.tensor(5), Asked({"target": "class"}, classes=(5,))),
        (np.array(5), Asked({"target": "class"}, classes=(5,))),
        ("Tiger", Asked({"target": "class"}, classes=(1,))),
        ("egyptian cat", Asked({"target": "class"}, classes=(3,))),
        ("cougar", Asked({"target": "class"}, classes=(4,))),
        (np.str_("Tiger"), Asked({"target": "class"}, classes=(1,))),
        (Class(), Asked({"target": "class"})),
        (Class(5), Asked({"target": "class"}, classes=(5,))),
        (Class(np.int32(5)), Asked({"target": "class"}, classes=(5,))),
        (Class("Panda Bear", scale="margin"), Asked({"target": "class", "scale": "margin"}, classes=(7,))),
        (Class(scale="finer"), Asked({"target": "class", "scale": "finer"})),
        ([5], Asked({"target": "class"}, classes=(5,), count=1)),
        ([5, 1, 5], Asked({"target": "class"}, classes=(5, 1, 5), count=3)),
        ((5, "tiger"), Asked({"target": "class"}, classes=(5, 2), count=2)),
        (["Egyptian CAT", np.int64(0)], Asked({"target": "class"}, classes=(3, 0), count=2)),
        (range(2), Asked({"target": "class"}, classes=(0, 1), count=2)),
        pytest.param((k for k in (1, 2)), Asked({"target": "class"}, classes=(1, 2), count=2), id="generator"),
        (np.array([5, 1]), Asked({"target": "class"}, classes=(5, 1), count=2)),
        (np.array(["dog ", "Tiger"])[1:], Asked({"target": "class"}, classes=(1,), count=1)),
        (torch.tensor([5, 1]), Asked({"target": "class"}, classes=(5, 1), count=2)),
        (torch.tensor([3]), Asked({"target": "class"}, classes=(3,), count=1)),
        ("class", Asked({"target": "class"})),
        ("itm", Asked({"target": "itm"})),
        ("contrastive", Asked({"target": "contrastive"})),
    ],
    ids=repr,
)
def test_what_is_given_is_understood(given, asked):
    assert read_target(given, BOTH, LABELS) == asked


def test_a_callable_is_a_target_of_the_users_own():
    for given, label in ((double, "double"), (Callable(), "callable"), (lambda output: output, "<lambda>")):
        found = read_target(given, CLASSES, LABELS)
        assert found.changes == {"target": "custom", "scale": "raw"}
        assert found.custom.function is given
        assert found.custom.head is None
        assert found.custom.label.endswith(label)
        assert found.count is None


def test_a_custom_target_is_kept_as_it_is():
    custom = Custom(double, head="itm", label="twice")
    assert read_target(custom, BOTH, LABELS) == Asked({"target": "custom", "scale": "raw"}, custom)


def test_a_name_of_a_score_and_of_a_class_is_refused_and_the_index_is_not():
    with pytest.raises(RecipeError, match="'itm' is the name of a score and of class 0; give the class' index"):
        read_target("itm", BOTH, ("itm", "other"))
    assert read_target(Class("itm"), BOTH, ("itm", "other")) == Asked({"target": "class"}, classes=(0,))
    assert read_target(["itm"], BOTH, ("itm", "other")).classes == (0,)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (1.5, r"^target=1.5: give a class \(index or label\), a list of classes, a vlcam.targets object"),
        (np.float64(1.5), r"^target=1.5: give a class"),
        (torch.tensor(1.5), r"^target=1.5: give a class"),
        (object, r"^target=<class 'object'>: give a class"),
        (Class, r"^target=<class 'vlcam.targets.Class'>: give a class"),
        ([], r"^target=\[\]: name at least one class"),
        ((), r"^target=\(\): name at least one class"),
        (np.array([], dtype=int), r"^target=\[\]: name at least one class"),
        ([1.5], r"^class 1.5: give a whole number or a label"),
        ([None], r"^class None: give a whole number or a label"),
        ([[1, 2]], r"^class \[1, 2\]: give a whole number or a label"),
        (torch.tensor([[1, 2]]), r"^class \[1, 2\]: give a whole number or a label"),
        (True, r"^class True: give a whole number or a label"),
        (np.True_, r"^class True: give a whole number or a label"),
        (torch.tensor([True, False]), r"^class True: give a whole number or a label"),
        (Class(True), r"^class True: give a whole number or a label"),
        (Class(1.5), r"^class 1.5: give a whole number or a label"),
        (Class([1, 2]), r"^class \[1, 2\]: give a whole number or a label"),
    ],
    ids=repr,
)
def test_what_names_no_class_is_refused(given, message):
    with pytest.raises(RecipeError, match=message):
        read_target(given, CLASSES, LABELS)


@pytest.mark.parametrize(
    "given", [8, -1, "unicorn", [0, 8], ["Tiger", "unicorn"], Class(8), Class("unicorn")], ids=repr
)
def test_a_class_that_the_model_lacks_is_refused(given):
    with pytest.raises(UnknownNameError, match=r"^no class "):
        read_target(given, CLASSES, LABELS)


@pytest.mark.parametrize("given", [3, "Tiger", [1], Class(), 1.5], ids=repr)
def test_a_model_without_classes_says_what_it_offers(given):
    with pytest.raises(RecipeError, match=r"this model tells no classes apart; it offers 'itm', 'contrastive'"):
        read_target(given, MATCHING, ())


# ---------------------------------------------------------------- explained classes


@pytest.mark.parametrize(
    ("classes", "wanted"),
    [
        ((None,), [2, 4]),
        ((1,), [1, 1]),
        ((0, 5), [0, 5]),
        ((None, 3), [2, 3]),
        ((3, None), [3, 4]),
        ((None, None), [2, 4]),
    ],
)
def test_the_explained_class_of_every_pair(classes, wanted):
    found = explained_classes(LOGITS, classes)
    assert found.dtype == torch.int64
    assert found.tolist() == wanted


@pytest.mark.parametrize(("classes", "listed"), [((6,), "6"), ((6, 0), "6"), ((0, 99), "99"), ((6, 7), "6, 7")])
def test_an_index_beyond_the_logits_is_refused(classes, listed):
    """A model without labels finds out only here."""
    with pytest.raises(UnknownNameError, match=rf"^no class {listed}; the model has classes 0 to 5$"):
        explained_classes(LOGITS, classes)


def test_the_choice_of_the_class_has_no_gradient():
    logits = LOGITS.clone().requires_grad_()
    assert not explained_classes(logits, (None,)).requires_grad


# ---------------------------------------------------------------- from a recipe to a target


@pytest.mark.parametrize(
    ("recipe", "heads", "label"),
    [
        (OF_CLASS, BOTH, "class_logit"),
        (OF_CLASS.replace(scale="log-probability"), BOTH, "class_log_probability"),
        (OF_CLASS.replace(scale="finer"), BOTH, "class_finer"),
        (OF_MATCH, BOTH, "itm_logit"),
        (OF_MATCH.replace(target="contrastive", scale="cosine"), BOTH, "contrastive_cosine"),
        (OF_TEXT, {"contrastive": "prompts"}, "contrastive_logit"),
        (OF_TEXT.replace(scale="difference"), {"contrastive": "sigmoid"}, "contrastive_difference"),
    ],
)
def test_a_target_is_labelled_by_head_and_scale(recipe, heads, label):
    target = resolve(recipe, heads, classes=(3,))
    assert (target.head, target.label) == (recipe.target, label)
    assert (target.differentiate, target.path, target.classes) == (True, "full", (3,))


@pytest.mark.parametrize(
    ("name", "path", "pooler", "bare"),
    [
        ("agcam", "direct", False, False),
        ("legrad", "block", False, False),
        ("legrad-pooler", "block", True, False),
        ("legrad-pooler-as-coded", "block", True, True),
        ("chefer-generic", "full", False, False),
        ("tam-transition", "integrated", False, False),
    ],
)
def test_a_target_knows_its_gradient_path(name, path, pooler, bare):
    target = resolve(recipes()[name].recipe, CLASSES | {"contrastive": "prompts"})
    assert (target.path, target.pooler, target.bare) == (path, pooler, bare)


@pytest.mark.parametrize("name", ["raw-attention", "attention-rollout", "pgc-eigencam"])
def test_a_recipe_without_target_differentiates_nothing(name):
    target = resolve(recipes()[name].recipe, CLASSES)
    assert (target.head, target.label, target.differentiate) == ("class", "none", False)
    assert torch.equal(target.read(LOGITS), torch.zeros(2, dtype=LOGITS.dtype))


def test_targets_are_equal_where_their_gradients_are():
    one, other = (resolve(OF_CLASS, CLASSES, classes=(3,)) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    for different in (
        resolve(OF_CLASS, CLASSES, classes=(4,)),
        resolve(OF_CLASS.replace(scale="margin"), CLASSES, classes=(3,)),
        resolve(recipes()["agcam"].recipe, CLASSES, classes=(3,)),
    ):
        assert one != different


def test_a_head_that_the_model_lacks_is_refused():
    with pytest.raises(RecipeError, match=r"^target='class': this model does not offer it; it offers 'itm', 'contr"):
        resolve(OF_CLASS, MATCHING)
    with pytest.raises(RecipeError, match=r"^target='extra': this model does not offer it; it offers 'class'"):
        resolve(OF_CLASS.replace(target="custom"), CLASSES, custom=Custom(double, head="extra"))


def test_a_custom_target_reads_its_head_or_the_first():
    recipe = OF_CLASS.replace(target="custom")
    first = resolve(recipe, BOTH, custom=Custom(double))
    other = resolve(recipe, BOTH, custom=Custom(double, head="contrastive", label="twice"))
    assert (first.head, first.label) == ("class", "custom")
    assert (other.head, other.label) == ("contrastive", "twice")
    assert torch.equal(first.read(LOGITS), 2 * LOGITS[:, 0])
    with pytest.raises(RecipeError, match="give the callable itself"):
        resolve(recipe, BOTH)


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda output: output, r"\(2, 6\)"),
        (lambda output: output.sum(), r"\(\)"),
        (lambda _: 1.0, "float"),
        (lambda _: None, "NoneType"),
    ],
)
def test_a_callable_must_return_one_scalar_per_pair(function, found):
    read = resolve(OF_CLASS.replace(target="custom"), CLASSES, custom=Custom(function)).read
    with pytest.raises(InputError, match=rf"returned {found}; it must .* shape \(2,\), for a .* of shape \(2, 6\)"):
        read(LOGITS)


# ---------------------------------------------------------------- the scores of a pair


def scores_of(pair, known=("class",), classes=(None,)):
    outputs = {"class": LOGITS, "itm": LOGITS[:, :2], "contrastive": LOGITS[:, 0] / 4}
    fetched = []

    def fetch():
        fetched.append(pair)
        return {name: output for name, output in outputs.items() if name not in known}

    return Scores(BOTH, pair, {name: outputs[name] for name in known}, fetch, classes), fetched


@pytest.mark.parametrize(("classes", "k"), [((None,), 4), ((5,), 5), ((0, 1), 1)])
def test_scores_are_those_of_the_explained_class(classes, k):
    scores, _ = scores_of(1, classes=classes)
    for scale in ("logit", "probability", "log-probability", "margin"):
        found = scores[f"class_{scale.replace('-', '_')}"]
        assert found.kind == scale
        assert math.isclose(float(found), slow_score(scale, LOGITS[1].tolist(), k), rel_tol=1e-9)


def test_scores_have_every_kind_but_finer_and_in_the_order_of_the_heads():
    scores, fetched = scores_of(0)
    kinds = ("logit", "probability", "log_probability", "margin")
    assert list(scores) == [f"class_{k}" for k in kinds] + [f"itm_{k}" for k in kinds] + ["contrastive_cosine"]
    assert len(scores) == 9
    assert fetched == []
    with pytest.raises(KeyError):
        scores["class_finer"]


def test_scores_of_other_heads_are_fetched_once_when_they_are_read():
    scores, fetched = scores_of(0)
    assert scores["class_logit"].value == 2.0
    assert fetched == []
    assert math.isclose(scores["itm_margin"].value, -1.5)
    assert scores["contrastive_cosine"].value == pytest.approx(0.075)
    assert fetched == [0]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda scores: pickle.loads(pickle.dumps(scores))])
def test_a_copy_of_scores_holds_the_numbers(copied):
    scores, _ = scores_of(0)
    found = copied(scores)
    assert type(found) is dict
    assert found == dict(scores)
    assert repr(scores) == repr(found)


@pytest.mark.parametrize(
    ("kind", "texts", "names"),
    [
        ("prompts", 1, ["cosine", "logit"]),
        ("sigmoid", 1, ["cosine", "logit", "probability", "log_probability"]),
        ("prompts", 5, ["cosine", "logit", "probability", "log_probability", "margin", "difference"]),
        ("sigmoid", 5, ["cosine", "logit", "probability", "log_probability", "margin", "difference"]),
    ],
)
def test_scores_of_a_text_name_what_they_compare(kind, texts, names):
    taking = SOME if texts == 5 else None
    scores = Scores({"contrastive": kind}, 1, {"contrastive": SIMILAR}, dict, (2, 1), taking, texts)
    assert list(scores) == [f"contrastive_{name}" for name in names]
    for name, score in scores.items():
        scale = name.removeprefix("contrastive_").replace("_", "-")
        wanted = slow_similarity(scale, kind, COSINES[1].tolist(), 1, [0, 1, 3, 4])
        assert score.value == pytest.approx(wanted, rel=1e-9)
        alone = scale in ("cosine", "logit") or (kind == "sigmoid" and "probability" in scale)
        assert score.kind == (scale if alone else f"{scale} over 5 texts")


def test_a_score_says_what_it_is():
    score = Score("class_probability", "probability", 0.97314)
    assert str(score) == "class_probability 0.9731 (probability)"
    assert float(score) == 0.97314
