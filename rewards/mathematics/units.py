r"""Units of an answer: 6 cm^2, 6\text{ square cm}, 5 \mathrm{~m}/\mathrm{s}, 30平方米, 5万元, 5 км.

Any words after a value are its unit, except those that make another value of it (5 or more, 5以上).
"""

import re

UNIT_TEXT = r"\\(?:text(?:bf|it|rm|normal)?|mathrm|mbox)\s*\{"
POWER = r"\s*(?:\^\s*\{?\s*([23])\s*\}?)?$"
UNIT = (
    r"(?!.*\b(?:or|and|to|not|more|less|most|least|dozen|half|halves|thirds?|plus|minus|times|over|squared|cubed"
    r"|factorial|oder|und|bis|mehr|weniger|halbe?|ou|et|moins|demi|ni|más|menos|или|и|до|более|менее|не)\b)"
    r"(?!.*[或和与且至到不多少半成折余几上下内外打的]|.*(?:阶乘|次方|倒数|相反))"
)
LETTERS = r"A-Za-zÀ-ÿА-я"
PATTERNS = [  # (words, power)
    rf"(?<![_^{{\s])\s*{UNIT_TEXT}(?!\s*[iej]\s*\}}){UNIT}([^{{}}\d]+)\}}{POWER}",
    rf"(?<=[\d)}}\]])\s*(?=\s[{LETTERS}.]{{3}}|(?:[mck]m|in|ft|yd|mi|kg|lb|oz|min|sec|hr|mph)(?:s|\b)|[а-я])"
    rf"{UNIT}([{LETTERS}.\s/]+){POWER}",
    rf"(?<=[\dA-Za-z)}}\]])\s*{UNIT}([\u4e00-\u9fff/]+){POWER}",
]
PATTERNS = [re.compile(pattern) for pattern in PATTERNS]
VALUE = re.compile(r"\d|\\(?!text|math|mbox)")  # what has a unit
TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf)|mbox|operatorname\*?|boldsymbol|bm)\s*\{([^{}]*)\}"
)
JOINT = re.compile(rf"\}}\s*/\s*{UNIT_TEXT}")  # of \mathrm{m}/\mathrm{s}
SPACED = str.maketrans({char: f" {char}" for char in "平立"} | {"方": "方 "})
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
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
        match = pattern.search(text)
        if match and VALUE.search(text, 0, match.start()):
            exponent, unit = _read(match[1], match[2], unit)
            text = text[: match.start()] + (rf"\cdot 10^{{{exponent}}}" if exponent else "")
        text = TEXT.sub(r" \1 ", text).strip()
    return text, unit


def _read(words, power, unit):
    """(exponent of ten, name of the unit) of the words after a value."""
    words = words.strip()
    scale = CHINESE_SCALE.match(words)[0]
    exponent = sum(map(CHINESE_SCALES.get, scale))
    words = words[len(scale) :].translate(SPACED).lower().replace(".", "").split()
    words = [word.rstrip("s") for word in words]
    if words and words[0] in SCALES:
        exponent = SCALES[words.pop(0)]
    power = power or next((POWERS[word] for word in words if word in POWERS), "")
    name = " ".join(filter(None, (NAMES.get(word, word) for word in words)))
    return exponent, name + power if name else unit
