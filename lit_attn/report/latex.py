"""Plain text as LaTeX that prints it, whatever characters users put in a name."""

import re
import unicodedata

COMMANDS = {
    **{character: rf"\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "`": r"\textasciigrave{}",
    "\N{EN DASH}": r"\textendash{}",
    "\N{EM DASH}": r"\textemdash{}",
    "…": r"\dots{}",
    "†": r"\textdagger{}",
    "°": r"\textdegree{}",
}

# As Unicode names them. LaTeX has no commands for those that look like Latin letters.
SMALL_GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lamda mu nu xi pi rho sigma tau "
    "upsilon phi chi psi omega"
)
CAPITAL_GREEK = "Gamma Delta Theta Lamda Xi Pi Sigma Upsilon Phi Psi Omega"

MATHS = {
    "\N{MINUS SIGN}": "-",
    "±": r"\pm",
    "\N{MULTIPLICATION SIGN}": r"\times",
    "·": r"\cdot",
    "≤": r"\le",
    "≥": r"\ge",
    "≠": r"\ne",
    "≈": r"\approx",
    "∞": r"\infty",
    "→": r"\to",
    "⊥": r"\perp",
    "∥": r"\parallel",
    "√": r"\surd",
    **{
        unicodedata.lookup(f"GREEK {size} LETTER {name}"): rf"\{name}".replace("amda", "ambda")
        for size, names in (("SMALL", SMALL_GREEK), ("CAPITAL", CAPITAL_GREEK))
        for name in names.split()
    },
}

RAISED = {"<super>": "^", "<sub>": "_"}

# The accents that LaTeX's default font encoding composes with a letter: all but the ogonek.
ACCENTS = "\u0300\u0301\u0302\u0303\u0304\u0306\u0307\u0308\u030a\u030b\u030c\u0327"


def latex(text: str) -> str:
    """`text` for the body of a document that `pdflatex` compiles without further packages.

    Latin letters, Greek ones and the usual mathematical signs print as they are; a character that
    the default fonts lack prints as its code point, U+4E2D.
    """
    written = "".join(_character(character) for character in text)
    # Two of these in a row would print as a dash and as a double quote.
    return re.sub(r"([-'])(?=\1)", r"\1{}", written)


def _character(c: str) -> str:
    if c in COMMANDS:
        return COMMANDS[c]
    if c in MATHS:
        return f"${MATHS[c]}$"
    if c.isascii():
        return c if c.isprintable() else " "
    apart = unicodedata.normalize("NFD", c)
    if apart[0].isascii() and all(accent in ACCENTS for accent in apart[1:]):
        return c
    kind, _, point = unicodedata.decomposition(c).partition(" ")
    if kind in RAISED and (plain := chr(int(point.split()[0], 16))).isalnum() and plain.isascii():
        return f"${RAISED[kind]}{{{plain}}}$"
    return f"U+{ord(c):04X}"
