"""Makes `src/podium/reward/instructions/punkt_english.txt` from nltk's `punkt_tab` data: what `ifeval` needs of it.

    python benchmarks/make_punkt_data.py FOLDER

FOLDER is `tokenizers/punkt_tab/english`: of `nltk.download("punkt_tab")`, or out of the wheel of llama-index-core,
which holds it in `llama_index/core/_static/nltk_cache`.
"""

import hashlib
import sys
from pathlib import Path

OUT = Path(__file__).parents[1] / "src" / "podium" / "reward" / "instructions" / "punkt_english.txt"
FILES = ("abbrev_types.txt", "collocations.tab", "ortho_context.tab", "sent_starters.txt")
MID_UPPER, BEGIN_LOWER, UPPER, LOWER = 4, 16, 2 + 4 + 8, 16 + 32 + 64
"""Bits of a word's context: large letter within a sentence, small one at its beginning; either anywhere."""


def main(folder: Path) -> None:
    content = {name: (folder / name).read_bytes() for name in FILES}
    digest = hashlib.sha256(b"".join(content.values())).hexdigest()
    lines = {name: content[name].decode().splitlines() for name in FILES}
    seen = {word: int(bits) for word, bits in (line.split("\t") for line in lines["ortho_context.tab"])}
    lower = {word: bits for word, bits in seen.items() if bits & LOWER}
    sections = {
        "abbreviations": lines["abbrev_types.txt"],
        "collocations": [line.replace("\t", "|") for line in lines["collocations.tab"]],
        "starters": lines["sent_starters.txt"],
        "lower": [word for word, bits in lower.items() if not bits & MID_UPPER],
        "both": [word for word, bits in lower.items() if bits & MID_UPPER],
        "begins_lower": [word for word, bits in seen.items() if bits & BEGIN_LOWER and not bits & UPPER],
    }
    head = f"# English words for Punkt, made by benchmarks/make_punkt_data.py from nltk's punkt_tab, sha256 {digest}\n"
    body = "".join(f"{name}{chr(9)}{chr(9).join(sorted(words))}\n" for name, words in sections.items())
    OUT.write_text(head + body, encoding="utf-8")
    print({name: len(words) for name, words in sections.items()}, OUT.stat().st_size)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
