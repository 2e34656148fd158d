r"""Formulas in LaTeX: `wording.formula` writes them in plain text, and here its lines are read and set.

The lines are a small language. Symbols are single letters, with indices in brackets and a block behind an underscore:
`A[h,t,j]`, `G_l`. There are calls, `ReLU(...)`; reductions, `mean over i in patches of ...`; products, without a sign
or with `*`; quotients; sums. What is none of these is a word, and words between formulas stay words.

>>> print(align("w[c] = mean over i in patches of G[i,c]"))
\begin{align*}
w_{c} &= \operatorname*{mean}_{i \in \text{patches}} G_{i,c}
\end{align*}
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = ["align", "rows"]

_TOKEN = re.compile(
    r"(?P<derivative>d[a-z](?:_\w)?/d[A-Z](?:_\w)?(?!\w))"
    r"|(?P<range>\d\.\.\d)"
    r"|(?P<number>\d+(?:\.\d+)?(?:e-?\d+)?)"
    r"|(?P<symbol>[A-Za-z]\d?(?:_[A-Za-z0-9])?(?![\w'-]))"
    r"|(?P<word>[A-Za-z]+(?:[_'-][A-Za-z]+)*)"
    r"|(?P<sign>\.\.\.|<-|\S)"
)
_REDUCTIONS = {
    "mean": r"\operatorname*{mean}",
    "softmax": r"\operatorname*{softmax}",
    "sum": r"\sum",
    "max": r"\max",
    "min": r"\min",
}
_SIGNS = {"<-": r"\leftarrow", "...": r"\cdots", ".": r"\cdot", "*": r"\cdot", "|": r"\mid", "=": "=", "^": r"\wedge"}
_LONG = 64  # signs of plain text that fit beside each other on a page
_SHORT = 44  # two equations of this many signs share a row
_ORPHAN = 12  # a remark is not parted for the sake of this many signs
_TALL = re.compile(r"\\(frac|sum|operatorname\*|left)")


def align(formula: str) -> str:
    """The lines of `wording.formula` as an `align*` environment; needs the package amsmath."""
    found = [row for line in formula.splitlines() for row in rows(line)]
    return "\\begin{align*}\n" + " \\\\\n".join(found) + "\n\\end{align*}"


def rows(line: str) -> list[str]:
    """One line of a formula as rows of an `align*`: one per equation, and long remarks below it."""
    items = _Reader(_tokens(line)).sequence()
    return [
        _row(part, first=number == 0)
        for clause in _clauses(items)
        for number, part in enumerate(_wrapped(clause))
        if part
    ]


class _Token(NamedTuple):
    kind: str
    text: str
    spaced: bool  # whether a blank stands before it


class _Item(NamedTuple):
    """A piece of a line: `math`, a `relation`, a `mark` between clauses, or `prose`, whose LaTeX is plain text yet."""

    kind: str
    latex: str
    spaced: bool
    size: int = 1

    @property
    def prose(self) -> bool:
        return self.kind in ("prose", "mark")


def _tokens(line: str) -> list[_Token]:
    return [
        _Token(found.lastgroup or "sign", found.group(), found.start() > 0 and line[found.start() - 1].isspace())
        for found in _TOKEN.finditer(line)
    ]


_END = _Token("end", "", spaced=False)


class _Reader:
    """Reads tokens by recursive descent."""

    def __init__(self, tokens: Sequence[_Token]) -> None:
        self._tokens = tokens
        self._place = 0

    def _peek(self, ahead: int = 0) -> _Token:
        place = self._place + ahead
        return self._tokens[place] if 0 <= place < len(self._tokens) else _END

    def _take(self) -> _Token:
        self._place += 1
        return self._tokens[self._place - 1]

    def _at(self, text: str, *, glued: bool = False) -> bool:
        token = self._peek()
        return token.text == text and not (glued and token.spaced)

    def sequence(self, stop: str = "") -> list[_Item]:
        """Everything up to the sign that closes a bracket, which is taken, or up to the end."""
        items = []
        while self._peek() is not _END and not (stop and self._at(stop, glued=True)):
            items.append(self._item())
        if stop and self._peek() is not _END:
            self._take()
        return items

    def _item(self) -> _Item:
        start, spaced = self._place, self._peek().spaced
        if self._is_member():
            latex = self._member()
        elif self._begins():
            latex = self._term()
        else:
            return self._loose()
        return _Item("math", latex, spaced, sum(len(t.text) + t.spaced for t in self._tokens[start : self._place]))

    def _is_member(self) -> bool:
        """Whether an index is said to be in a set here: `i in patches`, first or behind a comma."""
        bare = self._peek().kind == "symbol" and self._peek(1).text == "in"
        return bare and self._peek(-1).text in ("", ",")

    def _loose(self) -> _Item:
        """A word, a sign between operands, or a mark between clauses."""
        token = self._take()
        if token.text in ("=", "<-"):
            return _Item("relation", _SIGNS[token.text], token.spaced)
        if token.text in (",", ";", ":"):
            return _Item("mark", token.text, token.spaced)
        if token.text == "..." and self._peek(-2).kind != "symbol":
            return _Item("math", r"\ldots", token.spaced)
        if token.kind == "sign" and token.text not in "()":
            return _Item("math", _SIGNS.get(token.text, token.text), token.spaced)
        return _Item("prose", token.text.replace("_", " "), token.spaced, len(token.text))

    def _begins(self) -> bool:
        """Whether an operand begins here."""
        token = self._peek()
        if token.kind == "symbol":
            return token.text != "a" or not self._is_article()
        if token.kind == "word":
            return self._is_operand()
        if token.text == "(":
            return not self._is_remark()
        if token.text == "|":
            return token.spaced and not self._peek(1).spaced
        return token.kind in ("derivative", "range", "number") or token.text == "["

    def _is_article(self) -> bool:
        follows = self._peek(1)
        return follows.kind in ("word", "number") and follows.text != "in"

    def _is_operand(self) -> bool:
        token, follows = self._peek(), self._peek(1)
        called = follows.text in ("(", "[") and not follows.spaced
        return called or token.text in ("log", "identity") or follows.text == "*" or self._body() > 0

    def _is_remark(self) -> bool:
        """Whether the bracket that opens here holds words alone."""
        ahead = 1
        while self._peek(ahead).kind == "word":
            ahead += 1
        return self._peek(ahead).text == ")"

    def _body(self) -> int:
        """How far ahead the body of a reduction begins; 0 where there is none, as in `the mean over heads`."""
        if self._peek().text not in _REDUCTIONS or self._peek(1).text != "over":
            return 0
        depth = 0
        for ahead in range(2, len(self._tokens) - self._place):
            token = self._peek(ahead)
            depth += (token.text in "([") - (token.text in ")]")
            if depth < 0 or token.text == ";":
                return 0
            if token.text == "of" and not depth and self._peek(ahead + 1).text != "the":
                return ahead + 1
        return 0

    def _term(self) -> str:
        """A product, or a quotient of one."""
        product = [self._factor()]
        while True:
            if self._at("/"):
                self._take()
                product = [_quotient(" ".join(product), self._factor())]
            elif self._is_sign():
                product.append(r"\times" if self._take().text == "x" else r"\cdot")
                product.append(self._factor())
            elif self._begins():
                product.append(self._factor())
            else:
                return " ".join(product)

    def _is_sign(self) -> bool:
        """Whether a sign of multiplication stands here: `*`, `.` between blanks, `x` between numbers."""
        token, follows = self._peek(), self._peek(1)
        numbers = self._peek(-1).kind == "number" == follows.kind
        return token.text == "*" or (token.text == "." and follows.spaced) or (token.text == "x" and numbers)

    def _factor(self) -> str:
        ahead = self._body()
        if ahead:
            return self._reduction(ahead)
        token = self._take()
        if token.kind == "number":
            return re.sub(r"1e(-?\d+)", r"10^{\1}", token.text)
        if token.kind == "range":
            return token.text.replace("..", r"\ldots ")
        if token.kind == "derivative":
            above, below = (part[1:] for part in token.text.split("/"))
            return rf"\frac{{\partial {_symbol(above)}}}{{\partial {self._indexed(below)}}}"
        if token.kind == "sign":
            return self._bracket(token.text)
        return self._named(token)

    def _named(self, token: _Token) -> str:
        if self._at("(", glued=True):
            return self._call(token.text)
        if token.text == "log":
            return rf"\log {self._factor()}"
        return self._indexed("I" if token.text == "identity" else token.text)

    def _bracket(self, sign: str) -> str:
        content = _joined(self.sequence({"(": ")", "[": "]", "|": "|"}[sign]))
        if sign == "[":
            return rf"\{{{content}\}}"
        if sign == "|":
            return rf"\left\lvert {content} \right\rvert"
        return self._postfix(_bracketed(content))

    def _call(self, name: str) -> str:
        self._take()
        content = _joined(self.sequence(")"))
        if name == "sqrt":
            return self._postfix(rf"\sqrt{{{content}}}")
        known = {"cos": r"\cos", "min": r"\min", "max": r"\max"}.get(name, rf"\operatorname{{{name}}}")
        return self._postfix((name if len(name) == 1 else known) + _bracketed(content))

    def _reduction(self, ahead: int) -> str:
        first, last = self._place + 2, self._place + ahead - 1
        sign = _REDUCTIONS[self._peek().text]
        binder = _Reader(self._tokens[first:last]).sequence()
        if binder and binder[-1].kind == "mark":
            binder.pop()
        self._place += ahead
        return rf"{sign}_{{{_joined([binder[0]._replace(spaced=False), *binder[1:]])}}} {self._term()}"

    def _member(self) -> str:
        """`i in patches`; numbers that stand for a set get its braces."""
        symbol = self._take().text
        self._take()
        if self._peek().kind != "number":
            return rf"{_symbol(symbol)} \in"
        return rf"{_symbol(symbol)} \in \{{{_joined(self.sequence())}\}}"

    def _indexed(self, name: str) -> str:
        return self._postfix(*_parts(name))

    def _postfix(self, base: str, block: str = "") -> str:
        """Indices and powers behind an operand."""
        low, high = "", f"({block})" if block else ""
        while self._at("[", glued=True) or self._at("^", glued=True):
            if self._take().text == "[":
                low = "".join(_joined([item]) if item.kind == "prose" else item.latex for item in self.sequence("]"))
            else:
                high += {"T": r"\top"}.get(self._peek().text, self._peek().text)
                self._take()
        return base + (f"_{{{low}}}" if low else "") + (f"^{{{high}}}" if high else "")


def _parts(name: str) -> tuple[str, str]:
    """A symbol and the block that it is of."""
    if not re.fullmatch(r"[A-Za-z]\d?(_\w)?", name):
        return rf"\text{{{name.replace('_', ' ')}}}", ""
    base, _, block = name.partition("_")
    return (base if len(base) == 1 else rf"\text{{{base}}}"), block


def _symbol(name: str) -> str:
    base, block = _parts(name)
    return f"{base}^{{({block})}}" if block else base


def _quotient(above: str, below: str) -> str:
    if above.isdecimal() and below.isdecimal():
        return f"{above}/{below}"
    return rf"\frac{{{_bare(above)}}}{{{_bare(below)}}}"


def _bracketed(content: str) -> str:
    return rf"\left({content}\right)" if _TALL.search(content) else f"({content})"


def _bare(operand: str) -> str:
    """An operand without the one pair of brackets around it, which a fraction's bar makes needless."""
    for opened, closed in ((r"\left(", r"\right)"), ("(", ")")):
        inner = operand[len(opened) : -len(closed)]
        if operand.startswith(opened) and operand.endswith(closed) and _balanced(inner):
            return inner
    return operand


def _balanced(text: str) -> bool:
    depth = 0
    for sign in text:
        depth += (sign == "(") - (sign == ")")
        if depth < 0:
            return False
    return depth == 0


def _clauses(items: Sequence[_Item]) -> Iterator[list[_Item]]:
    """Part a line at the marks behind which an equation begins, unless both are short; no semicolon is needed there."""
    clause: list[_Item] = []
    for place, item in enumerate(items):
        follows = [each.kind for each in items[place + 1 : place + 3]]
        if item.kind != "mark" or follows != ["math", "relation"]:
            clause.append(item)
        elif item.latex == "," and _size(clause) + _size(items[place:]) <= _SHORT:
            clause.append(_Item("math", r",\quad", spaced=False))
        else:
            yield clause + ([] if item.latex == ";" else [item])
            clause = []
    yield clause


def _size(items: Sequence[_Item]) -> int:
    return sum(item.size + item.spaced for item in items)


def _wrapped(clause: Sequence[_Item]) -> Iterator[list[_Item]]:
    """Part a clause that is too long for a line, before a word or behind one."""
    part: list[_Item] = []
    for place, item in enumerate(clause):
        full = _size([*part, item]) > _LONG and _size(clause[place:]) > _ORPHAN
        if part and item.spaced and full and (item.prose or part[-1].prose):
            yield part
            part = []
        part.append(item)
    yield part


def _row(items: Sequence[_Item], *, first: bool) -> str:
    """A row, aligned at its first relation; one that has none, or goes on from the one above, stands behind it."""
    place = next((i for i, item in enumerate(items) if item.kind == "relation"), 0) if first else 0
    items = [items[0]._replace(spaced=False), *items[1:]]
    if place == 0 or any(item.prose for item in items[:place]):
        return ("&" if first else r"&\quad ") + _joined(items)
    return f"{_joined(items[:place])} &{_joined(items[place:])}"


def _joined(items: Sequence[_Item]) -> str:
    r"""Words that follow each other share one `\text`, with the blanks at its ends that formulas would swallow."""
    made: list[str] = []
    words = ""
    for place, item in enumerate(items):
        before = items[place - 1] if place else None
        follows = items[place + 1] if place + 1 < len(items) else None
        if item.kind == "prose" or (item.kind == "mark" and (words or (follows and follows.kind == "prose"))):
            words += (" " if item.spaced and before and not _gaps(before) else "") + item.latex
            if follows is None or not follows.prose:
                blank = " " if follows and follows.spaced and follows.kind != "relation" else ""
                made.append(rf"\text{{{words}{blank}}}")
                words = ""
        else:
            made.append(item.latex)
    return re.sub(r" ([,;:])(?= |$|\\)", r"\1", " ".join(made))


def _gaps(item: _Item) -> bool:
    """Whether formulas leave a gap behind it, so that a blank is not needed."""
    return item.kind == "relation" or item.latex.endswith((r"\in", r"\mid"))
