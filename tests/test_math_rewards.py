r"""Rewards of mathematics: equality of answers, finding the answer, hostile input."""

import builtins
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import golden

from rewards import compute_score
from rewards.boxed import last_boxed
from rewards.mathematics import symbolic
from rewards.mathematics.equivalence import equal
from rewards.mathematics.latex import NUMBER_RULES, RULES, WORD_RULES, normalize

SOURCES = ("lighteval/MATH", "aime_2024", "numina_olympiads", "hiyouga/geometry3k")


def score(source, text, truth, extra_info=None):
    return compute_score(source, text, truth, extra_info)["score"]


def test_spellings_of_a_value():
    """Spellings of random values get full marks, and no spelling of a wrong value near them does."""
    for case in golden("math_values"):
        found = score(case["data_source"], case["solution_str"], case["ground_truth"])
        assert (found == 1) == case["right"], case


def test_each_rule_of_spelling_does_what_its_example_says():
    for pattern, replacement, example in [*RULES, *WORD_RULES, *NUMBER_RULES]:
        before, after = example.split(" -> ")
        assert re.sub(pattern, replacement, before) == after, pattern


EQUAL = r"""
\frac{-1}3 | -\frac{1}{3}
2^{-1} | 0.5   3\frac12 | 3.5
7 1/2 | 7.5   -3\frac12x | -\frac{7x}{2}
1,234,567.50 | 1234567.5   6\% | 6
6% | 0.06                       0.06 | 6\%                      50\% | \frac12
\$40 | 40 dollars   6 centimeters | 6\text{ cm}
6 cm^2 | 6\text{ square cm}     \text{7 days} | 7               864 \mbox{ inches}^2 | 864
3:30\text{ PM} | \text{3:30 p.m.}   2.5\text{ million} | 2500000
6π | 6\pi   x² | x^2   2½ | 2.5
5 = x | 5   x = 2+3 = 5 | 5
y = 3+2x | y=2x+3   2x-y+3=0 | y=2x+3
\text{total} = 57 | 57          x=1 \text{ or } x=-2 | -2,1     5; 6 | 6\text{ and }5
\{6,5\} | 5,6                   \pm 3 | 3,-3                    (0.5, 2/4) | (\frac12,.5)
(1,2),(3,4) | (3,4),(1,2)       (2,\infty)\cup(0,1] | (0,1]\cup(2,\infty)   x\in[1,2) | [1,2)
x>6 | (6,\infty)                2<x\le 5 | (2,5]                -2x<4 | x>-2
6<x | x>6                       \sqrt{8} | 2\sqrt2              \sqrt[3]{-8} | -2
\sqrt{5+2\sqrt6} | \sqrt2+\sqrt3   8^{1/3} | 2                     \sqrt{-4} | 2i
(1+i)^2 | 2i                    e^{i\pi} | -1                   4i+3 | 3+4i
2(3) | 6                        \frac42\frac12 | 1              \binom52\frac12 | 5
3\times 10^4 | 30000            (x-1)(x+1) | x^2-1              \sin 2x | 2\sin x\cos x
\ln x^2 | 2\ln x   |x| | \sqrt{x^2}
\binom{n}{2} | \frac{n(n-1)}2   x**2 | x^2
\frac{2015!}{2014!} | 2015   1.5e3 | 1500
\begin{bmatrix}1/2\\3\end{bmatrix} | \begin{pmatrix}0.5\\3.0\end{pmatrix}
2\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}2\\4\end{pmatrix}
-1.2\overline{27} | -\frac{27}{22}   (x,y)=(1,2) | (1,2)
5 months | 5   5 millimeters | 5 mm   5 milliliters | 5   5 tons | 5   5 hundred thousand | 500000
\begin{pmatrix}1&2\\3&4\end{pmatrix}^2 | \begin{pmatrix}7&10\\15&22\end{pmatrix}
5 £ | 5 pounds   x\in\{1,2\} | 2,1   (11)_2 | 11_{2}   -89,908.5 | -89908,5
1:2:3 | 2:4:6   (2) 6; (1) 5 | (1) 5.0; (2) 6   (2)(3) | 6   \{5\} | 5   n\equiv1\pmod4 | n\equiv 1\pmod{4}
x=1,y=2;x=3,y=4 | (3,4),(1,2)   y=4,x=3\text{ or }x=1,y=2 | x=1,y=2;x=3,y=4   x_1=1,x_2=2 | 2,1
[n(n+1)]/2 | \frac{n^2+n}2   f^{-1}(x)=2x | 2x   5\text{ N} | 5   \{1234,5\} | \{5,1{,}234\}   10-3-2 | 5
5\text{ cm} | 5   5\text{kW} | 5   2^{(3)} | 8
\tan 22.5^\circ | \sqrt2-1       k\pi,k\in\mathbb Z | k\pi, k\in\mathbb{Z}
\cos 60^\circ | \frac12   sin(30°) | 0.5   2\sin 45^{\circ} | \sqrt2
"""
DIFFERENT = r"""
1,2,3,4,5 | 3
\pm 3 | 3                       \text{5 or 6} | 6               5 (or 6) | 5
5 \to 6 | 6                     5 \approx 6 | 5                 5..7 | 5.7   2\mathbf{v} | 2
3+4\mathrm{i} | 3+4   1\$09 | 109   1^\circ09 | 109
5 6 | 30                        1 9 | 9
1,09 | 109                      1,23,456 | 123456               7=5 | 5
\frac71=5 | 5                   x = 5 = 7 | 7                   59 hmm = 57 | 57
x=5 | y=5                       4 | x^2+y^2=4                   x^2+1=0 | x^2+2=0
0.3333333333333333 | \frac13   0.0000001 | 0
3.0000001 | 3                   \pi+10^{-30} | \pi              2^{200}+1 | 2^{200}
\sqrt{-1} | 1                   -\infty | \infty                5 | \infty
1/0 | \infty   0/0 | 0
600 | 6\%                       600 | 6                         40 cents | \$40
6 km | 6\text{ m}               5\text{ or more} | 5            at least 5 | 5
2\text{ million} | 2            3:30 a.m. | 3:30\text{ p.m.}    (1,2) | \{1,2\}
(1,2) | 1,2   [1,2] | [1,2)
(1,2) | (1,2,0)                 \{1\} | \{1,2\}                 (0,1]\cup(2,3) | (2,3)
x \ge 6 | (6,\infty)            12_{10} | 12_8                  1010_2 | 1010
Evelny | \text{Evelyn}          neve | even                     6ab | 6                         x | X
x_1 | x_2
\begin{pmatrix}1&2\\3&4\end{pmatrix}^2 | \begin{pmatrix}1&2\\3&4\end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix}^{-1} | \begin{pmatrix}1&2\\3&4\end{pmatrix}
\sqrt{\begin{pmatrix}1&2\\3&4\end{pmatrix}} | \begin{pmatrix}1&2\\3&4\end{pmatrix}
|\begin{pmatrix}1&2\\3&4\end{pmatrix}| | \begin{pmatrix}1&2\\3&4\end{pmatrix}
0.\overline{08} | 0.\overline{8}
A^T | A                         2^T | 2                         3!! | 720
x\not=5 | 5                     x \not= 5 | x=5                x\not\in(1,2) | (1,2)
0.333... | 0.333                1,2,3,... | 1,2,3               0.3\dots | 0.3
y=1, x=2 | (1,2)                (1,2) | y=1, x=2                y=1,x=2 | 1,2
€5 | \$5                        £5 | 5 dollars                  5 € | 5 yuan
3 tenths | 3                    3\text{ fifths} | 3             3 quarters | 3                 3 dozen | 3
5 lakh | 5                      5 hundred thousand | 500        3 thousand five hundred | 3000
5 Millionen | 5                 5 mille | 5                     5 milliards | 5                5 mil | 5
5 млн | 5                       5 тысяч | 5                     5 Zehntel | 5                  5 dixièmes | 5
5 below zero | 5                5\text{ is wrong} | 5           5 only if n is even | 5        5左右 | 5
5\text{ rounded} | 5            5\text{ negative} | 5           log2(8) | \log(2)8             5分之3 | 5
x=1,y=2;x=3,y=4 | x=1,y=4;x=3,y=2              x=1,y=2;x=3,y=4 | (1,4),(3,2)    x_1=1,x_2=2 | x_1=2,x_2=1
1:2:3 | 1:3:2                   3:4:5 | 3:4             0:1:2 | 0:2:1      1:0:2 | 1:0:3
(1) 5 | 5                       (2) 5 | 10              (i) 5 (ii) 6 | (i) 6 (ii) 5
(1) 5; (2) 6 | (1) 6; (2) 5
f(1)=3 | f(2)=1                 g(2)=5 | g(5)=2         f^{-1}(x) | \frac{1}{f(x)}    f^{(2)}(x) | f^2(x)
DBAC | ABCD                     IV | VI                 2026-01-02 | 2026-02-01       1/2/2026 | 2/4/2026
\mathcal{A} | \mathbb{A}         \vec{a}\times\vec{b} | \vec{b}\times\vec{a}         \mathbb{Z} | Z
0x10 | 0                        x\equiv 5 | 5           n\equiv1\pmod4 | 1,n
x\equiv2\pmod3 | x\equiv2\pmod5   \{1,234\} | 1234              \{\emptyset\} | \emptyset
2[x] | 2x                       \{x\}+1 | x+1           [\frac{n}{2}] | \frac n2
5\text{ab} | 5   ~5 | 5   x^{(2)} | x^2   \{x\} | x   \{5x\} | 5   (\{x\}) | x   \approx 5 | 5
5\text{x} | 5                   5\mathrm{n} | 5         5\text{ pi} | 5               5\text{π} | 5
\text{not } x=5 | 5                we reject x=5 | 5       5\text{?} | 5            5 can never occur | 5
5 doubled | 5                   5 ago | 5               5 maybe | 5                   5 onwards | 5
\begin{vmatrix}1&2\\3&4\end{vmatrix} | \begin{pmatrix}1&2\\3&4\end{pmatrix}
"""


def pairs(table):
    """(answer, truth) of the cells of a table, which three blanks or more part."""
    return [cell.strip().split(" | ", 1) for cell in re.split(r"\s{3,}|\n", table) if cell.strip()]


@pytest.mark.parametrize(("answer", "truth"), pairs(EQUAL))
def test_equal(answer, truth):
    assert equal(answer, truth)


@pytest.mark.parametrize(("answer", "truth"), pairs(DIFFERENT))
def test_different(answer, truth):
    assert not equal(answer, truth)


@pytest.mark.parametrize("truth", ["", " ", "nan", "None", "[INVALID]", r"\text{}"])
def test_no_answer_equals_a_missing_truth(truth):
    assert not equal(truth, truth)


def test_normalize():
    assert normalize(r"$\dfrac12\text{ centimeters}$") == (r"\frac{1}{2}", "cm")
    assert normalize(r"\left( 3,\,\tfrac\pi2 \right)") == (r"(3,\frac{\pi}{2})", "")
    assert normalize(r"x^2 + 10^-3y_{12}") == ("x^{2}+10^{-3}y_{12}", "")


@pytest.mark.parametrize("case", golden("boxes"))
def test_last_boxed(case):
    assert last_boxed(case["text"]) == case["box"]


DENIALS = (
    " is wrong.|, which is false.|, which cannot be.|? No.| is not the answer.| isn't it.| was wrong."
    "| is incorrect.|, but that is impossible.| can't be right."
).split("|")


# Responses without a box: the answer is 5. /n is a new line, // a backslash
STATED = r"""
The answer is 5.|Answer: $5$|**Answer:** $x=5$|Answer: `5`|Final answer: 5 cm|Final Answer/n/n5|## Answer/n/n5
The final answer is: **5**|So, the answer is $5$.|Therefore, the correct answer is 5 dollars.|It is 5.|#### 5
Thus the number of ordered pairs is 5.|Hence there are 5 ways.|Therefore, the total is 5 apples.|so x = 5
Thus, $a+b = 5$.|Hence x = 2 + 3 = 5.|So we get/n$$x/n=5.$$|So the smallest $n$ is 5.|2+3 = 5/n5|x = 5
Thus, the value of $a+b$ is $5$.|We add./n/n//[5//]|The answer is:/n//(5//)|<answer>5</answer>|> **5**|$5$|5 cm
The answer is $2+3=5$.|The answer is 5 meters per second.|The answer is $6$. Wait, no. The answer is $5$.
La réponse finale est $5$.|Donc la réponse est 5.|Die richtige Antwort lautet 5.|La respuesta es 5.
Final Answer: The final answer is $5$.|**Answer:** The answer is 5|Answer: #### 5|Final answer:/nThe answer is $5$.
$5|**$5**|x = $5|He pays $4./n$5|€5|+5|Ответ: $5$ см.|答案是5。|所以答案是 **5**。|因此 x = 5。|所以 $n$ 的最小值为 $5$。|答：5元
"""  # noqa: E501
# Right answers that the rule does not read
UNREAD = r"""
The answer is 5, because 2+3 = 5.|5 is the answer.|There are 5 ways.|The sum is 5.|Total: 5|I get $5$ in the end
The final answer is $5$. I hope it is correct.|The answer is exactly 5.|2+3 = 5, so x = 5.|Therefore, Bob has 5 apples.
"""  # noqa: E501
NOT_STATED = r"""
So the number of pairs is infinite|We get x = 5./nSo there is none.|It is false that the answer is 5.|So it isn't 5
In base 7, the answer is 5.|So in base 7 it is 5.|The answer is 5 in base 7.|Answer: 5 (base 7)|So x = 5 with either sign
The answer is 5. Checking: 2+4 = 6, so it is 6.|The answer is 5. Also 7.|At first glance, the answer is 5.|5?|5+
So half the answer is 5.|So the wrong answer is 5|So the other root is 5|So if n is even, it is 5.|So one root is 5.
So the upper bound is 5.|So there are at least 5.|So there are not 5.|The answer cannot be/n5|Therefore 5 works
He wrote:/nThe answer is 5.|This is wrong:/n5|Nobody thinks that/nthe answer is 5|Is the answer 5?|So x = 5 fails
The answer is 5!|So x > 5|Thus x = 5 and y = 6|Answer: 5 or 6|Answer: 5 maybe|Answer: 5 perhaps|Answer: 5 more
Answer: 5 minus|Answer: 5 tenths|Answer: 5 dozen|Answer: 5 halves|Answer: not 5|Answer: 5 for even n|Answer: -5
Roots:/n- 4/n- 5|Roots:/n1. 4/n2. 5|Step/n5|See [5].|Case 2: $n=5$|$5$ is too small.|4 : 5|4 — 5|one hundred 5
The answer is $5$; $6$.|The answer is *not* $5$.|The answer isn’t $5$.|The answer is below $5$.|The answer is - 5.
The answer is 5./nActually no.|The answer is ~~$5$~~ $6$|The answer is $5$ squared.|5 (mod 7)|The result is -$5$.
答案不是5|所以答案不是5|答案是5或6|答案是至少5|因此x≠5|答案是5，不对|答案：5以上|答案：5左右|答案是5吗？|所以最多为5
Antwort: nicht 5|Réponse : au moins $5$|Respuesta: $5$ y $6$|Ответ: $5$ и $6$|"The answer is 5."|So the answer is 5, he said.
"""  # noqa: E501


@pytest.mark.parametrize(("table", "expected"), [(STATED, 1), (UNREAD, 0), (NOT_STATED, 0)])
def test_an_answer_without_a_box_is_stated(table, expected):
    texts = re.split(r"(?<!/)\||\n", table.strip())
    texts = [text.replace("/n", "\n").replace("//", "\\").replace("/|", "|") for text in texts]
    assert [text for text in texts if score("numina_olympiads", text, "5") != expected] == []


def test_finds_the_answer():
    for case in golden("math_answers"):
        text = case["before"] + case["text"]
        assert score(case["data_source"], text, case["ground_truth"]) == case["score"], case
    for answer in ("$5$", "5", "**5**"):
        for denied in DENIALS:
            assert score("numina_olympiads", f"The answer is {answer}{denied}", "5") == 0, denied


def test_results_for_metrics():
    result = compute_score("aime_2024", "Answer: $1{,}057$ dollars", "1057")
    assert result == {"score": 1.0, "acc": True, "pred": "1057"}
    assert compute_score("lighteval/MATH", "no box", "2") == {"score": 0.0, "acc": False, "pred": ""}
    assert score("lighteval/MATH", "The answer is 2", "2", {"use_math_verify": True}) == 1.0
    assert compute_score("lighteval/MATH", "\\boxed{" + "x" * 10**6 + "}", "2")["pred"] == "x" * 1000


@pytest.mark.parametrize("case", golden("equal_answers"), ids=lambda case: case["texts"][0])
def test_equal_answers_have_one_spelling(case):
    source = case["data_source"]
    assert len({compute_score(source, text, "7")["pred"] for text in case["texts"]}) == 1
    for none in ("no answer", ""):
        assert compute_score(source, none, "7")["pred"] == ""


HOSTILE = [
    "9^{9^{9^{9}}}", "9**9**9**9", "10**(10**9) * \\pi", "(10^8)!", "5" + "!" * 30,
    "\\binom{1000000}{500000}", "\\Gamma(10^{10})", "\\cos(9^{9^9})", "(x+y+z+w)^{400}", "x^{999999}",
    "\\sum_{n=1}^{10^9} \\frac{1}{n^2}", "\\int_0^1 x^{x^{x^x}} dx", "\\gcd(10^{99999},3)",
    "{" * 150 + "1" + "}" * 149, "(" * 20000 + "1" + ")" * 20000, "\\frac{1}{" * 400 + "2" + "}" * 400,
    "-" * 900 + "1", "7" * 5000, "1e999999999", "1" + ",1" * 400, "5\x00", "\ud800",
    "\\operatorname{eye}(99999)", "().__class__.__base__.__subclasses__()",
]  # fmt: skip


@pytest.mark.parametrize("answer", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_answers_are_refused(answer, monkeypatch):
    monkeypatch.setattr("rewards.mathematics.equivalence.TIMEOUT_S", 0.5)
    assert not equal(answer, "6")


def test_a_hanging_comparison_is_ended_and_the_next_is_right(monkeypatch):
    monkeypatch.setattr("rewards.mathematics.equivalence.TIMEOUT_S", 0.5)
    assert not equal("\\gcd(10^{9999999},3)", "6")  # computed in C inside the parser
    monkeypatch.undo()
    assert equal("x+x", "2x")


def test_no_text_is_evaluated(tmp_path, monkeypatch):
    importlib.import_module("sympy.physics.units")  # sympy's own eval() of constants, at import

    def refuse(*args):
        raise AssertionError(f"eval{args[:1]}")

    monkeypatch.setattr(builtins, "eval", refuse)
    for answer, truth in pairs(EQUAL):
        a, b = normalize(answer)[0], normalize(truth)[0]
        assert symbolic.equal(a, b) or equal(answer, truth)
    mark = tmp_path / "mark"
    for code in (
        f"open('{mark}','w')",
        f"__import__('os').system('touch {mark}')",
        f"exec(\"open('{mark}')\")",
    ):
        for form in (
            "{}",
            "{} or \\pi",
            "[{}]",
            "\\text{{{}}}",
            "x_{{{}}}",
            "\\operatorname{{{}}}(1)",
            "x={}",
        ):
            symbolic.equal(form.format(code), "5")  # even without the filter of characters in front of it
            for source in SOURCES:
                score(source, f"Answer: \\boxed{{{form.format(code)}}}", "5")
    assert not mark.exists()


def test_the_trainer_does_not_import_sympy():
    code = "import sys, rewards.math, rewards.geo3k, rewards.math_dapo; assert 'sympy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])
