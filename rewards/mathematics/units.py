r"""Units of an answer: 6 cm^2, 6\text{ square cm}, 5 \mathrm{~m}/\mathrm{s}, 30平方米, 5万元, 5 км.

Any words after a value are its unit, except those that make another value of it (5 or more, 5 tenths, 5以上).
"""

import re

UNIT_TEXT = r"\\(?:text(?:bf|it|rm|normal)?|mathrm|mbox)\s*\{"
POWER = r"\s*(?:\^\s*\{?\s*([23])\s*\}?)?$"
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
# Words that make another value of the number before them: how they begin in the languages of the data.
NUMBER_WORD = (
    r"(?:(?:dozen|score|gross|couple|lakh|crore|bn|mn|tn|half|hal[bv]e|third|(?:qua|cua)rt(?:er|o)?|quint[oa]|terzo"
    r"|tercio|tiers|fourth|fifth|sixth|seventh|eighth|ninth|tenth|eleventh|twelfth|hundred|hundredth|thousand"
    r"|thousandth|zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|demi|mil|mila|mille|mio|mrd|mld"
    r"|mln|tys|тыс|млн|млрд|пол)s?"
    r"|\w+(?:teen|teenth|tieth)s?|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|\w+llionths?"
    r"|(?:bi|tri|mi)l+(?:i?[oó]|iar)\w*|milh\w+|миллион\w*|миллиард\w*|тысяч\w*"
    r"|(?:zwei|drei|drit|vier|fünf|sechs|sieb|acht|neun|zehn|hundert|tausend|dutzend)\w*|\w+i[eè]mes?"
    r"|(?:douz|cent|vingt)aines?|milliers?|(?:décim|centésim|milésim|decim|millesim)\w+|do[cz]{1,2}[ei]na?s?"
    r"|(?:дюжин|трет|четверт|десят|сот|половин)\w*)"
)
# Other words that are in no unit: conjunctions, prepositions, verbs, comparisons, adverbs.
NO_UNIT = (
    "or and nor to not no if when unless except only but than then is are was were be at by above below"
    " under over before between after about around nearly almost rounded approx more less most least max"
    " maximum minimum greater fewer larger smaller plus minus times negative positive wrong incorrect mod"
    " modulo remainder rem k squared cubed factorial pi sqrt"
    " twice doubled ago maybe perhaps onwards upwards oder und bis mehr weniger wenn etwa nicht halber"
    " ou et moins si environ ni más menos più meno или и до но не если более менее около"
    " for can may might does did fail fails never ish"
)
NO_UNIT = re.compile(rf"(?i:{'|'.join(NO_UNIT.split())}|\w+ly|{NUMBER_WORD})")
NO_CHINESE_UNIT = re.compile(r"[或和与且至到不多少半成折余几约左上下内外打的点分又负?]|阶乘|次方|倒数|相反")
LEADING_SCALES = re.compile(rf"(?i:\s*(?:{'|'.join(SCALES)})s?\b)*")
SHORT = (  # units of two letters; others are a product: 5\text{ab}
    "am|cc|cl|cm|dl|dm|ft|gb|gr|ha|hl|hm|hp|hr|in|kb|kg|km|kw|lb|mb|mg|mi|ml|mm|ms|mv|mw|ng|nm|ns|oz|pm|pt|qt|sq|st"
    "|tb|tn|yd|yr"
)
LETTERS = r"A-Za-zÀ-ÿА-я"
PATTERNS = [  # (words, power)
    rf"(?<![_^{{\s])\s*{UNIT_TEXT}(?!\s*(?:[eijnp-rx-z]|(?!{SHORT})[a-z]{{2}})\s*\}})([^{{}}\d]+)\}}{POWER}",
    rf"(?<=[\d)}}\]])\s*(?=\s[{LETTERS}.]{{3}}|(?:[mck]m|in|ft|yd|mi|kg|lb|oz|min|sec|hr|mph)(?:s|\b)|[а-я])"
    rf"([{LETTERS}.\s/]+){POWER}",
    rf"(?<=[\dA-Za-z)}}\]])\s*([\u4e00-\u9fff/]+){POWER}",
]
PATTERNS = [re.compile(pattern) for pattern in PATTERNS]
VALUE = re.compile(r"\d|\\(?!text|math|mbox)")  # what has a unit
TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf)|mbox|operatorname\*?|boldsymbol|bm)\s*\{([^{}]*)\}"
)
JOINT = re.compile(rf"\}}\s*/\s*{UNIT_TEXT}")  # of \mathrm{m}/\mathrm{s}
SPACED = str.maketrans({char: f" {char}" for char in "平立"} | {"方": "方 "})
CHINESE_SCALE = re.compile(r"(?:[十百万亿]|千(?![克米瓦帕卡焦]))*")
CHINESE_SCALES = dict(zip("十百千万亿", (1, 2, 3, 4, 8)))
POWERS = {"square": "2", "sq": "2", "平方": "2", "cubic": "3", "立方": "3"}
NAMES = (
    "millimeter=mm centimeter=cm meter=m kilometer=km metre=m centimetre=cm kilometre=km inch=in inche=in"
    " foot=ft feet=ft yard=yd mile=mi gram=g kilogram=kg pound=lb ounce=oz hour=hr"
    " minute=min second=sec percent=%"
    " pct=% percentage=% degree= unit= square= sq= cubic= 平方= 立方= 个= 度= 元=yuan 毫米=mm"
    " 厘米=cm 分米=dm 米=m"
    " 千米=km 公里=km 克=g 千克=kg 公斤=kg 小时=hr 分钟=min 秒=sec 升=l 毫升=ml м=m см=cm км=km кг=kg"
)
NAMES = dict(pair.split("=") for pair in NAMES.split())


def split_unit(text, unit=""):
    r"""(value without \text{}, unit) of a text; words such as million or 万 are factors of the value."""
    text = JOINT.sub("/", text)
    for pattern in PATTERNS:
        match = next((m for m in pattern.finditer(text) if _is_unit(text[m.start(1) :])), None)
        if match and VALUE.search(text, 0, match.start()):
            exponent, unit = _read(match[1], match[2], unit)
            text = text[: match.start()] + (rf"\cdot 10^{{{exponent}}}" if exponent else "")
        text = TEXT.sub(r" \1 ", text).strip()
    return text, unit


def _is_unit(text):
    """Whether no word of what follows a value makes another value of it."""
    words = re.findall(r"\w+", text[LEADING_SCALES.match(text).end() :])
    return not NO_CHINESE_UNIT.search(text) and not any(map(NO_UNIT.fullmatch, words))


def _read(words, power, unit):
    """(exponent of ten, name of the unit) of the words after a value."""
    words = words.strip()
    scale = CHINESE_SCALE.match(words)[0]
    exponent = sum(map(CHINESE_SCALES.get, scale))
    words = words[len(scale) :].translate(SPACED).lower().replace(".", "").split()
    words = [word.rstrip("s") for word in words]
    while words and words[0] in SCALES:
        exponent += SCALES[words.pop(0)]
    power = power or next((POWERS[word] for word in words if word in POWERS), "")
    name = " ".join(filter(None, (NAMES.get(word, word) for word in words)))
    return exponent, name + power if name else unit
