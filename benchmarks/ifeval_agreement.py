"""Records the verdicts of published checkers on generated texts, for `reward/instructions/test_ifeval_published.py`.

    pip install lm-eval nltk immutabledict langdetect      # an environment of its own
    python benchmarks/ifeval_agreement.py NLTK_DATA IF_FUNCTIONS OUT.jsonl.gz [CASES]

NLTK_DATA holds `tokenizers/punkt_tab`, of `nltk.download("punkt_tab")` or out of the wheel of llama-index-core.
IF_FUNCTIONS is open-instruct's `open_instruct/if_functions.py`. Followed so far: lm-eval 0.4.13, nltk 3.10.4,
langdetect 1.0.9, punkt_tab with the digest in `reward/instructions/punkt_english.txt`, open-instruct 021dd069.

A line is [name, arguments, text, verdict] for an instruction of IFEval or a function of Tulu 3, or
["counts", {}, text, [sentences, words in capitals]].
"""

import gzip
import importlib.util
import json
import logging
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORDS = "sun moon river paper light quick brown fox letter number answer music garden winter people".split()  # noqa: SIM905
PHRASES = ["Any other questions?", "The end.", "THE END", "that is all", "Cheers!"]
MARKERS = ["P.S.", "P.P.S", "P.S", "p.s.", "PS:"]
OTHERS = {
    "de": "Das Wetter ist heute schön und wir gehen im Park spazieren.",
    "fr": "Le chat dort sur le canapé et la pluie tombe dehors.",
    "ru": "Сегодня хорошая погода, и мы идём гулять в парк.",
    "ar": "الطقس جميل اليوم ونحن نذهب إلى الحديقة.",
    "ja": "今日は天気がいいので公園を散歩します。",
    "en": "The weather is nice today and we go for a walk in the park.",
}
MARKS = [". ", "! ", "? ", "... ", "!!! ", "?! ", ". . . ", "… ", "; ", ": ", ", ", "--", " — ", "–", "-", ".- ", "., "]
AROUND = ['""', "''", "()", "[]", "{}", "“”", "‘’", "«»", "``", "**", "__", "<>", "( ", ' "', " '", " ”", "  "]
SPACES = ["  ", "\n", "\n\n", "\t", "", "\u00a0", "\r\n", " \n "]
PIECES = {
    "json": ['{"a": 1}', "```json\n[1]\n```", " [1] ", '```\n"x"\n```  ', "{'a': 1}", "{", "NaN", '{"a": 1}.'],
    "title": ["<<title>>", "<<>>", "<< >>", "<<a\nb>>", "<title>", "<<<x>>>", "<<a> >", "<<a>> <<b>>"],
    "placeholder": ["[name]", "[]", "[a] [b]", "[[x]]", "[two\nlines]", "[address], [date]"],
    "constrained": ["My answer is yes.", "My answer is no.", "My answer is maybe.", "my answer is yes."],
    "choice": ["My answer is yes.", "yes", "no"],
    "highlight": ["*a*", "**b**", "***x***", "* *", "**", "*a* *b*", "*a\nb*", "**a*", "*bold **in* it**"],
    "section": ["Section 1\nA.", "SECTION 2 B.", "section3", "PARAGRAPH 1", "Section", "Section  4"],
    "paragraph": ["***", "\n***\n", "* * *", "\n* * *\n", "\n\n", "Sun is up.", "Moon, too."],
    "two_responses": ["******", "\n******\n", "***", "A yes.", "A no.", " "],
    "bullet": ["* a\n", "- b\n", " * c\n", "** d\n", "*e\n", "-f\n", "+ g\n", "\t* h\n", "*** i\n"],
    "postscript": [*MARKERS, "P. S. yes", "p. p. s", "P.P.S. no"],
    "language": list(OTHERS.values()),
    "quotation": ['"', '"Yes."', "“No.”", '" '],
}
"""What texts for an instruction are made of, by a part of its name."""


def english_words(data: Path) -> tuple[list[str], list[str], list[str]]:
    """Of Punkt's own lists, so that every decision comes up: words, abbreviations, pairs."""
    folder = data / "tokenizers" / "punkt_tab" / "english"
    read = {
        name: (folder / name).read_text(encoding="utf-8").splitlines()
        for name in ("ortho_context.tab", "abbrev_types.txt", "collocations.tab")
    }
    pairs = [line.replace("##number##", "12").replace("\t", ". ") for line in read["collocations.tab"]]
    return [line.split("\t")[0] for line in read["ortho_context.tab"]], read["abbrev_types.txt"], pairs


SPECIAL = (  # noqa: SIM905
    "U.S. e.g. i.e. a.m. Ph.D. Mr. J. I I'm don't DON'T CANNOT MORE'N wanna GONNA it's NASA 1.5 3. 1,000 -2. $5 2019. "
    "No. etc. vs. Inc. St. Jan. x.y #1 & _ 1. a) III. O'NEIL 'TIS 'TWAS WE'LL THEY'RE HE'D I'VE CAN'T AT&T A-B GIMME "
    "WANNA D'YE ÉTÉ 日本 。 Привет. مرحبا. ② ½. x². U-S. co-op. non-co. Q&A WHO,WHAT HI:THERE 12:30 E.T. 'S S' JAMES'"
).split()


class Writer:
    """Texts by chance."""

    def __init__(self, chance: random.Random, data: Path) -> None:
        self.chance = chance
        self._words, self._abbreviations, self._pairs = english_words(data)

    def marked(self) -> str:
        """Runs of marks, quotes, abbreviations and dashes."""
        return "".join(self._marked_word() for _ in range(self.chance.randint(1, 14)))

    def _marked_word(self) -> str:
        one = self.chance
        abbreviation = one.choice(self._abbreviations) + "."
        word = one.choice([one.choice(self._words), one.choice(SPECIAL), abbreviation, one.choice(WORDS + self._pairs)])
        word = one.choice([word, word, word.capitalize(), word.capitalize(), word.upper()])
        before, after = one.choice(AROUND) if one.random() < 0.2 else ("", "")
        mark = one.choice(MARKS) if one.random() < 0.5 else " "
        return before + word + after + mark + (one.choice(SPACES) if one.random() < 0.2 else "")

    def sentence(self) -> str:
        one = self.chance
        text = " ".join(one.choice(WORDS) for _ in range(one.randint(2, 6))) + one.choice(".,!?;")
        return one.choice([text.capitalize(), text.capitalize(), text.upper(), text, one.choice(PHRASES)])

    def text(self, name: str) -> str:
        """One that may well follow the instruction of that name."""
        one = self.chance
        known = next((pieces for key, pieces in PIECES.items() if key in name), None)
        if known is None and one.random() < 0.3:
            return self.marked()
        parts = [
            one.choice(known) if known and one.random() < 0.7 else self.sentence() for _ in range(one.randint(1, 5))
        ]
        text = one.choice(["\n", " ", "", "\n\n"]).join(parts)
        if "quotation" in name and one.random() < 0.5:
            return f'"{text}"'
        if name.startswith(("change_case:english", "validate_upper", "validate_lower")):
            text = OTHERS["en"] if one.random() < 0.5 else text
            return one.choice([text.upper(), text.lower(), text])
        return text

    def word_of(self, text: str) -> str:
        known = [word.strip('.,!?"*') for word in text.split()]
        return self.chance.choice([word for word in known if word.isalpha()] or WORDS)


def ifeval_arguments(writer: Writer, text: str) -> dict[str, Callable[[], dict[str, Any]]]:
    one, few = writer.chance, writer.chance.randint(1, 4)
    relation = one.choice(["less than", "at least"])
    filled = max(1, sum(bool(part.strip()) for part in text.split("\n\n")))
    return {
        "keywords:existence": lambda: {"keywords": [writer.word_of(text), one.choice(WORDS)][: one.randint(1, 2)]},
        "keywords:frequency": lambda: {"keyword": writer.word_of(text), "frequency": few, "relation": relation},
        "keywords:forbidden_words": lambda: {"forbidden_words": [one.choice(WORDS)]},
        "keywords:letter_frequency": lambda: {
            "letter": one.choice("aeioxA"),
            "let_frequency": 2 * few,
            "let_relation": relation,
        },
        "language:response_language": lambda: {"language": one.choice(list(OTHERS))},
        "length_constraints:number_sentences": lambda: {"num_sentences": 2 * few, "relation": relation},
        "length_constraints:number_paragraphs": lambda: {"num_paragraphs": few},
        "length_constraints:number_words": lambda: {"num_words": 5 * few, "relation": relation},
        "length_constraints:nth_paragraph_first_word": lambda: {
            "num_paragraphs": filled,
            "nth_paragraph": one.randint(1, filled),
            "first_word": writer.word_of(text).lower(),
        },
        "detectable_content:number_placeholders": lambda: {"num_placeholders": few},
        "detectable_content:postscript": lambda: {"postscript_marker": one.choice(["P.S.", "P.P.S"])},
        "detectable_format:number_bullet_lists": lambda: {"num_bullets": few},
        "detectable_format:constrained_response": dict,
        "detectable_format:number_highlighted_sections": lambda: {"num_highlights": few},
        "detectable_format:multiple_sections": lambda: {
            "section_spliter": one.choice(["Section", "SECTION"]),
            "num_sections": few,
        },
        "detectable_format:json_format": dict,
        "detectable_format:title": dict,
        "combination:two_responses": dict,
        "combination:repeat_prompt": lambda: {
            "prompt_to_repeat": one.choice([text[:9].strip() or "sun", one.choice(WORDS)])
        },
        "startend:end_checker": lambda: {"end_phrase": one.choice([*PHRASES, text[-9:].strip() or "sun"])},
        "startend:quotation": dict,
        "change_case:capital_word_frequency": lambda: {"capital_frequency": few, "capital_relation": relation},
        "change_case:english_capital": dict,
        "change_case:english_lowercase": dict,
        "punctuation:no_comma": dict,
    }


def tulu3_arguments(writer: Writer, text: str) -> dict[str, Callable[[], dict[str, Any]]]:
    one, few = writer.chance, writer.chance.randint(1, 4)
    quantifier = one.choice(["at least", "around", "at most"])
    count = len(text.split("\n\n"))
    return {
        "verify_keywords": lambda: {"keyword_list": [writer.word_of(text), one.choice(WORDS)][: one.randint(1, 2)]},
        "verify_keyword_frequency": lambda: {"word": writer.word_of(text), "N": few},
        "validate_forbidden_words": lambda: {"forbidden_words": [one.choice(WORDS)]},
        "verify_letter_frequency": lambda: {"letter": one.choice("aeioxA"), "N": few},
        "validate_response_language": lambda: {"language": one.choice(list(OTHERS))},
        "verify_paragraph_count": lambda: {"N": few},
        "validate_word_constraint": lambda: {"N": 5 * few, "quantifier": quantifier},
        "verify_sentence_constraint": lambda: {"N": few, "quantifier": quantifier},
        "validate_paragraphs": lambda: {"N": count, "first_word": writer.word_of(text), "i": one.randint(1, count)},
        "verify_postscript": lambda: {"postscript_marker": one.choice(MARKERS)},
        "validate_placeholders": lambda: {"N": few},
        "verify_bullet_points": lambda: {"N": few},
        "validate_title": dict,
        "validate_choice": lambda: {"options": ["yes", "no"]},
        "validate_highlighted_sections": lambda: {"N": few},
        "validate_sections": lambda: {"N": few, "section_splitter": one.choice(["Section", "SECTION"])},
        "validate_json_format": dict,
        "validate_repeat_prompt": lambda: {
            "original_prompt": one.choice([text.strip()[:9] or "sun", one.choice(WORDS)])
        },
        "validate_two_responses": dict,
        "validate_uppercase": dict,
        "validate_lowercase": dict,
        "validate_frequency_capital_words": lambda: {"N": few, "quantifier": quantifier},
        "validate_end": lambda: {"end_phrase": one.choice([*PHRASES, text.strip()[-9:] or "sun"])},
        "validate_quotation": dict,
        "validate_no_commas": dict,
    }


class Published:
    """The checkers as published, with what stands around them in their own evaluations."""

    def __init__(self, data: Path, functions: Path) -> None:
        import langdetect
        import nltk
        from lm_eval.tasks.ifeval import instructions_registry, instructions_util
        from nltk.tokenize.punkt import PunktTokenizer

        nltk.data.path = [str(data)]
        langdetect.DetectorFactory.seed = 0
        punkt = PunktTokenizer("english")
        instructions_util._get_sentence_tokenizer = lambda: punkt
        spec = importlib.util.spec_from_file_location("if_functions", functions)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self._functions, self._registry = module.IF_FUNCTIONS_MAP, instructions_registry.INSTRUCTION_DICT
        self._nothing_to_tell = langdetect.LangDetectException
        self._punkt, self._split = punkt, nltk.word_tokenize

    def counts(self, text: str) -> list[int]:
        return [len(self._punkt.tokenize(text)), sum(map(str.isupper, self._split(text)))]

    def ifeval(self, name: str, arguments: dict[str, Any], text: str) -> bool:
        instruction = self._registry[name](name)
        instruction.build_description(**arguments)
        return bool(text.strip() and instruction.check_following(text))

    def tulu3(self, name: str, arguments: dict[str, Any], text: str) -> bool:
        text = text.replace("<answer>", "").replace("</answer>", "").strip()
        try:
            return bool(text and self._functions[name](text, **arguments))
        except self._nothing_to_tell:
            return False


def main(data: Path, functions: Path, out: Path, cases: int) -> None:
    logging.disable(logging.CRITICAL)
    writer, published = Writer(random.Random(21), data), Published(data, functions)
    lines: list[Any] = []
    for suite, judge in ((ifeval_arguments, published.ifeval), (tulu3_arguments, published.tulu3)):
        for name in suite(writer, ""):
            for _ in range(cases // 50):
                text = writer.text(name)
                arguments = suite(writer, text)[name]()
                lines.append([name, arguments, text, judge(name, arguments, text)])
    for _ in range(cases):
        text = writer.marked()
        lines.append(["counts", {}, text, published.counts(text)])
    content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
    out.write_bytes(gzip.compress(content, mtime=0))
    print(f"{len(lines)} cases, {sum(line[3] is True for line in lines)} of them followed")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else 2500)
