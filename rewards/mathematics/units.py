r"""Units of an answer: 6 cm^2, 6\text{ square cm}, 5 \mathrm{~m}/\mathrm{s}, 30平方米, 5万元, 5 км, 12 ways.

A unit is a name below, raised or divided by another one, or an English noun in the plural.  Powers of ten in
words (5 million, 5万) are factors.  What else follows a value makes it another answer (5 or more, 5 tenths).
"""

import re

NAMES = (
    "millimeter=mm centimeter=cm decimeter=dm meter=m kilometer=km metre=m centimetre=cm kilometre=km mètre=m"
    " inch=in inche=in foot=ft feet=ft yard=yd mile=mi gram=g kilogram=kg milligram=mg ton=t tonne=t pound=lb"
    " ounce=oz hour=hr minute=min second=sec day= week= month= year= liter=l litre=l milliliter=ml percent=%"
    " pct=% percentage=% degree= unit= cent= euro= dollar= people= person= men= women= children= path="
    " length= width= mm= cm= dm= km= m= in= ft= yd= mi= g= kg= mg= lb= oz= h= hr= min= s= sec= ms= l= L= ml="
    " mL= cc= mph= kph= N= J= W= V= A= Pa= Hz= K= kw= kwh= hp= am= pm= yuan= C= F="
    " 毫米=mm 厘米=cm 分米=dm 米=m 千米=km 公里=km 克=g 千克=kg 公斤=kg 吨=t 小时=hr 分钟=min 秒=sec 升=l"
    " 毫升=ml 元=yuan 角= 个= 度= 种= 人= 名= 天= 年= 月= 岁= 只= 条= 本= 件= 次= м=m см=cm км=km г=g кг=kg"
)
NAMES = {name: short or name for name, _, short in (pair.partition("=") for pair in NAMES.split())}
NAMES |= dict.fromkeys(["unit", "degree", "个", "度"], "")
POWERS = {"square": "2", "sq": "2", "平方": "2", "cubic": "3", "立方": "3"}
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
SCALES |= dict(zip("十百千万亿", (1, 2, 3, 4, 8)))
# Parts and multiples of one, in the languages of the data: they end as a plural does, and are no unit
NUMBER_WORD = (
    r"(?:\w*(?:third|quarter|fourth|fifth|sixth|seventh|eighth|ninth|tenth|eleventh|twelfth|teenth|tieth"
    r"|hundredth|thousandth|hal[fv]e?|dozen|score|gross|couple|lakh|crore|hundred|thousand|ll?ion|ll?ionth"
    r"|lliard|illier|aine|cuarto|tercio|quint[oa])s?)"
)
# CAREFUL: some words in -s are adverbs; -ss and -us end no plural (less, minus)
PLURAL = re.compile(rf"(?!{NUMBER_WORD}\Z|(?:always|perhaps|others|\w*wards)\Z)[a-z]{{2,}}(?<![su])s")
TEXT_COMMAND = r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf)|mbox|operatorname\*?|boldsymbol|bm)"
TEXT = re.compile(rf"{TEXT_COMMAND}\s*\{{([^{{}}]*)\}}")
JOINT = re.compile(rf"\}}\s*/\s*{TEXT_COMMAND}\s*\{{")  # of \mathrm{m}/\mathrm{s}
LETTERS = r"A-Za-zÀ-ÿА-я\u4e00-\u9fff"
POWER = r"\s*(?:\^\s*\{?\s*([23])\s*\}?)?\s*\Z"
MARKED = re.compile(rf"(?<![_^{{\s])\s*{TEXT_COMMAND}\s*\{{([^{{}}\d]+)\}}{POWER}")
PLAIN = re.compile(
    rf"(?<=[\dA-Za-z)}}\]])\s*(?<=[\d)}}\]\s])((?![A-Za-z](?:[^\w.]|\Z))[{LETTERS}][{LETTERS}.\s/]*){POWER}"
)
WORD = re.compile(r"平方|立方|千(?=[克米])\w+|[十百千万亿]|[\u4e00-\u9fff]+|[^\W\d_]+|/|\S")
VALUE = re.compile(r"\d|\\(?!text|math|mbox)")  # what has a unit


def split_unit(text, unit=""):
    r"""(value without \text{}, unit) of a text; words such as million or 万 are factors of the value."""
    text = JOINT.sub("/", text)
    for pattern in (MARKED, PLAIN):
        match = pattern.search(text)
        found = match and VALUE.search(text, 0, match.start()) and _read(match[1], match[2])
        if found:
            exponent, name = found
            unit = name or unit
            text = text[: match.start()]
            if exponent:
                text += rf"\cdot 10^{{{exponent}}}"
        text = TEXT.sub(r" \1 ", text).strip()
    return text, unit


def _read(words, power):
    """(exponent of ten, name of the unit) of the words after a value; None if they are no unit."""
    words = [x if len(x) == 1 else x.lower() for x in WORD.findall(words.replace(".", "").replace("~", " "))]
    exponent = 0
    while words and words[0].rstrip("s") in SCALES:
        exponent += SCALES[words.pop(0).rstrip("s")]
    if words and words[0] in POWERS:
        power = POWERS[words.pop(0)]
    names = [NAMES.get(word, NAMES.get(word.rstrip("s"))) for word in words]
    if names and names[0] is None and PLURAL.fullmatch(words[0]):
        names[0] = words[0].rstrip("s")
    if len(words) == 3 and words[1] in ("/", "per"):
        names[1:] = ["/", names[2] or words[2]]
    elif len(words) > 1:
        return None
    if None in names:
        return None
    return exponent, "".join(names) + (power or "")
