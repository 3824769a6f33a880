"""Numbers that others published and the text quotes: where they stand, beside the text's citation.

Each was looked up in the paper's own text, or in its abstract where that is said.
"""

from __future__ import annotations

#: name in the text, ``\\pub{name}`` -> (LaTeX, key in refs.bib, where it stands)
PUBLISHED: dict[str, tuple[str, str, str]] = {
    "nvfp4 gap": (r"about 1.5\,\%", "nvfp4", "8B hybrid, 1T tokens, section on MXFP4"),
    "mxfp4 gap": (r"about 2.5\,\%", "nvfp4", "8B hybrid, 1T tokens, section on MXFP4"),
    "token multiplier": (r"36\,\%", "nvfp4", "1.36T instead of 1T tokens for equal loss"),
    "nvfp4 tokens": ("1.36", "nvfp4", "the same as a factor"),
    "nvfp4 size": ("8B", "nvfp4", "model of that comparison"),
    "nvfp4 rht none": ("1.2B", "nvfp4", "appendix: size and signs of the rotation show nothing"),
    "nvfp4 kept": (r"about 15\,\%", "nvfp4", "share of linear layers kept, most at the end"),
    "deepseek bits": ("about 14", "deepseekv3", "section 3.3.2"),
    "deepseek error": (r"nearly 2\,\%", "deepseekv3", "section 3.3.2, K = 4096"),
    "deepseek interval": ("128", "deepseekv3", "section 3.3.2"),
    "master share": (r"5\,\%", "mixed", "section 3.1, figure 2b: exponents below -24"),
    "master ratio": (r"2{,}048", "mixed", "section 3.1"),
    "mxfp8 size": ("8B", "mxfp8", "abstract"),
    "mxfp8 tokens": ("15T", "mxfp8", "abstract"),
    "root three": (r"$\sqrt{3}$", "fp4alltheway", "abstract"),
    "fishman tokens": ("200B", "fp8trillion", "figure 2 caption: sporadic outliers after them"),
}
